"""What the functions of the API have in common: this process's storage and host, and what is asked of them."""

from __future__ import annotations

import contextlib
import queue
import time
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from verl_workflow.errors import ErrorCode, VerlWorkflowError
from verl_workflow.storage import Store
from verl_workflow.workflow._client import Client, default_storage, python_path
from verl_workflow.workflow._definition import bears, run_exists, run_key
from verl_workflow.workflow._exceptions import WorkflowNotFoundError, WorkflowNotResumableError
from verl_workflow.workflow._fold import RunStatus
from verl_workflow.workflow._graph import Names, graph_of
from verl_workflow.workflow._names import RunKey, check_name
from verl_workflow.workflow._node import current_store, in_step, save_graph
from verl_workflow.workflow._options import plain_metadata
from verl_workflow.workflow._outputs import await_output, is_elsewhere
from verl_workflow.workflow._state import RunState, read_run
from verl_workflow.workflow._turn import clear_turn

_PRESENT: Client | None = None
_UNSETTLED: dict[str, Client] = {}


@dataclass(frozen=True, kw_only=True)
class Asked:
    """A workflow that the host was asked to drive. Attributes: mark: by which it knows this wish; empty when it has
    ended already.
    """

    run: RunKey
    mark: str = ""


def use(found: Client) -> None:
    """Make this the process's client."""
    global _PRESENT
    _PRESENT = found


def storage() -> Store:
    return client().store


def client() -> Client:
    """What `init` has settled; where it was not called, inside of a step, that step's storage, else the default one."""
    if _PRESENT is not None:
        return _PRESENT
    store = current_store() if in_step() else Store(default_storage())
    return _UNSETTLED.setdefault(store.uri, Client(store))


def begin_workflow(
    dag: Any, args: tuple[Any, ...], kwargs: dict[str, Any], workflow_id: str | None, metadata: dict[str, Any] | None
) -> Asked:
    """Record a workflow and hand it to the host, or resume it."""
    from verl_workflow.workflow._dag import DagView, is_node

    if not is_node(dag):
        raise TypeError(f"Input should be a DAG. Give it f.bind(...), not {type(dag).__name__}.")
    metadata = plain_metadata(metadata)
    workflow_id = check_name(new_id() if workflow_id is None else workflow_id, "workflow_id", ErrorCode.RUN_ID_INVALID)
    store = storage()
    if run_exists(store, workflow_id):
        return go_on(existing(workflow_id), "accept")
    key = RunKey.new(workflow_id)
    view = DagView(args, kwargs)
    graph = graph_of(dag, view, store, f"{key.folder}/objects", is_node=is_node, path=python_path())
    saved = save_graph(graph, store, key.folder)
    root = Names().give(saved.names)[-1]
    record = {"graph": saved.graph_key, "sha256": saved.sha256, "root": root, "metadata": metadata}
    return _begin(key, {"workflow": record})


def begin_fork(workflow_id: str, from_step: str, fork_id: str | None) -> Asked:
    """Record a fork and hand it to the host."""
    from verl_workflow.workflow._fork import check_fork, copy_workflow, id_taken

    state = existing(workflow_id)
    fork_id = new_id() if fork_id is None else fork_id
    store = storage()
    with found(workflow_id, state.key):
        check_fork(store, state, from_step, fork_id)
        key = RunKey.new(fork_id)
        forked = copy_workflow(store, state, from_step, key)
    try:
        return _begin(key, forked.definition, forked.seed)
    except RuntimeError as error:
        # Somebody was faster.
        raise id_taken(storage(), fork_id) from error


def _begin(key: RunKey, definition: dict[str, Any], seed: Sequence[dict[str, Any]] = ()) -> Asked:
    """Have a workflow recorded and driven; what was written for one that is refused is removed."""
    try:
        return Asked(run=key, mark=ask("begin", key, definition, client().caller(), seed))
    except (queue.Full, RuntimeError):
        if not run_exists(storage(), key.run_id) or run_key(storage(), key.run_id) != key:
            storage().delete_all(storage().list(key.folder), key.folder)
        raise


def new_id() -> str:
    return f"{uuid.uuid4()}.{time.time():.9f}"


def take_up(workflow_id: str, on_code_change: str) -> Asked:
    if on_code_change not in ("accept", "rerun", "fail"):
        raise ValueError(f"on_code_change has to be accept, rerun or fail, not {on_code_change!r}.")
    return go_on(existing(workflow_id), on_code_change)


def go_on(state: RunState, on_code_change: str) -> Asked:
    workflow_id = state.run_id
    if not is_workflow(state):
        raise WorkflowNotResumableError.of(workflow_id, "it is a run of a pipeline (see `verl-workflow resume`)")
    if state.status in {RunStatus.RUNNING, RunStatus.PENDING}:
        raise RuntimeError(f"Workflow '{workflow_id}' is already running or pending.")
    if state.status is RunStatus.CANCELLED:
        raise WorkflowNotResumableError.of(workflow_id, "it was cancelled")
    if state.status is RunStatus.SUCCEEDED:
        return Asked(run=state.key)
    from verl_workflow.workflow._guard import changed_steps

    reset = changed_steps(state, storage(), on_code_change)
    return Asked(run=state.key, mark=ask("submit", workflow_id, state.epoch, client().caller(), reset))


def existing(workflow_id: str) -> RunState:
    workflow_id = check_name(workflow_id, "workflow_id", ErrorCode.RUN_ID_INVALID)
    with found(workflow_id):
        return read_run(storage(), workflow_id, progress=False)


@contextlib.contextmanager
def found(workflow_id: str, run: RunKey | None = None) -> Iterator[None]:
    """Raise WorkflowNotFoundError when there is no such workflow inside, or not this one any more.

    Args:
        run: what is looked at: of one that is just being deleted, files are missing.
    """
    try:
        yield
    except VerlWorkflowError as error:
        gone = error.code is ErrorCode.RUN_UNKNOWN
        if error.code is ErrorCode.JOURNAL_DAMAGED:
            gone = not (run_exists(storage(), workflow_id) if run is None else bears(storage(), run))
        if not gone:
            raise
        raise WorkflowNotFoundError.of(workflow_id, storage().uri) from error


def is_workflow(state: RunState) -> bool:
    return "workflow" in state.definition or state.status is RunStatus.DAMAGED


def ask(method: str, *args: Any) -> Any:
    """Call a method of the host, of a new one if it was ended. What it raises is raised as itself, unwrapped."""
    import ray

    present = client()
    for last in (False, True):
        try:
            return ray.get(getattr(present.host(), method).remote(*args))
        except ray.exceptions.RayTaskError as error:
            raise error.cause from error
        except ray.exceptions.ActorDiedError:
            present.forget()
            if last:
                raise
    raise AssertionError("not reached")


def withdraw(workflow_id: str) -> bool:
    """Take a workflow out of the queue that it waits in; False when it has just left it, to be driven.

    Its host is asked where it is on this cluster; any other finds it withdrawn when its turn has come.
    """
    import ray

    with found(workflow_id):
        run = run_key(storage(), workflow_id)
    if ray.is_initialized() and not ask("withdraw", workflow_id):
        return False
    clear_turn(storage(), run)
    return True


def deliver(asked: Asked) -> Any:
    # What has ended before needs no cluster.
    stopped = ask("wait", asked.run.run_id, asked.mark) if asked.mark else None
    # What somebody else has ended, or drives, is told by the storage.
    if stopped is not None and not is_elsewhere(stopped):
        raise stopped
    return await_output(storage(), asked.run, None)


def output_ref(asked: Asked, task_id: str | None = None) -> Any:
    """A reference to what `get_output` gives; the host waits for it, and holds no worker for that."""
    if not asked.mark:
        # One that was ended for good is found out before the reference is given.
        ask("hello", None, None)
    return client().host().output.remote(asked.run, task_id, asked.mark)
