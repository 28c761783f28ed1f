"""The functions of ray.workflow, on today's Ray."""

from __future__ import annotations

import logging
import time
import uuid
from typing import TYPE_CHECKING, Any, Literal

from verl_workflow.errors import ErrorCode, FencedError, UserError, VerlWorkflowError
from verl_workflow.storage import Store
from verl_workflow.workflow._client import Client, default_storage, python_path
from verl_workflow.workflow._exceptions import (
    WorkflowNotFoundError,
    WorkflowNotResumableError,
    WorkflowStillActiveError,
)
from verl_workflow.workflow._fold import TERMINAL_STATES, RunStatus
from verl_workflow.workflow._graph import Names, graph_of
from verl_workflow.workflow._names import check_name, run_folder
from verl_workflow.workflow._node import in_step, save_graph
from verl_workflow.workflow._options import check_user_metadata
from verl_workflow.workflow._outputs import await_output
from verl_workflow.workflow._state import RunState, list_runs, read_run, request_cancel, run_exists
from verl_workflow.workflow._status import WorkflowStatus

if TYPE_CHECKING:
    from verl_workflow.workflow._gc import Collected

_CLIENT: Client | None = None
_POLL_S = 0.05
_LONGEST_POLL_S = 1.0
_log = logging.getLogger(__name__)


def init(
    *,
    storage: str | None = None,
    max_running_workflows: int | None = None,
    max_pending_workflows: int | None = None,
    durability: Literal["process", "power"] | None = None,
) -> None:
    """Say where workflows are kept, and how many run at a time. Without it the defaults hold.

    Args:
        storage: a folder that all nodes see, or an ``s3://``, ``gs://`` or ``az://`` address; default
            ``VERL_WORKFLOW_STORAGE``, or ``.verl-workflow`` in the working directory.
        max_running_workflows: on this cluster and storage; the others wait their turn. -1: any number. None: as it
            is, or any number.
        max_pending_workflows: how many may wait; more are refused with ``queue.Full``. -1 and None likewise.
        durability: ``process``: what was committed survives the death of any process; ``power``: of the machine too,
            on a local disk (each file is flushed to it). Default ``VERL_WORKFLOW_DURABILITY``, or ``process``.

    Raises:
        TypeError, ValueError: a limit is no whole number, or none that makes sense, or not the one that the running
            host was started with.
    """
    _check_limit("max_running_workflows", max_running_workflows, least=1)
    _check_limit("max_pending_workflows", max_pending_workflows, least=0)
    global _CLIENT
    store = Store(storage or default_storage(), durability=durability)
    _CLIENT = Client(store, max_running_workflows, max_pending_workflows)
    if max_running_workflows is not None or max_pending_workflows is not None:
        # To be told now, not by the first workflow.
        _CLIENT.host()


def run(
    dag: Any, *args: Any, workflow_id: str | None = None, metadata: dict[str, Any] | None = None, **kwargs: Any
) -> Any:
    """Run a workflow and wait for its output.

    Guarantees: each step is committed exactly once, and executed at least once; never again after its commit.

    Args:
        dag: ``f.bind(...)``, of functions made by ``@ray.remote``.
        args, kwargs: what the graph's ``InputNode`` stands for.
        workflow_id: 1 to 200 characters of any text; default: a new one. A finished one's output is given back and
            nothing executed; one that was left is resumed.
        metadata: a dict of plain JSON, given back by `get_metadata`.

    Raises:
        TypeError: `dag` is no graph, or arguments do not fit a function's signature.
        RuntimeError: a workflow of this id is running or pending.
        queue.Full: too many are pending already.
        WorkflowExecutionError: a step has failed for good; its error is the ``__cause__``.
        WorkflowCancellationError: it was cancelled.
    """
    return _deliver(_begin(dag, args, kwargs, workflow_id, metadata))


def run_async(
    dag: Any, *args: Any, workflow_id: str | None = None, metadata: dict[str, Any] | None = None, **kwargs: Any
) -> Any:
    """As `run`, without waiting: an object reference to the output."""
    return _output_ref(_begin(dag, args, kwargs, workflow_id, metadata), None)


def resume(workflow_id: str, *, on_code_change: Literal["accept", "rerun", "fail"] = "accept") -> Any:
    """Take up a workflow where it was left, and wait for its output; that of a finished one is given back at once.

    Args:
        on_code_change: what to do when the source of a finished step's function is no longer what it was when the
            workflow was made. ``accept``: keep its value, with a warning. ``rerun``: execute it, and what depends on
            it, again. ``fail``: raise. Functions of the script itself travel with the workflow and do not change.

    Raises:
        RuntimeError: it is running or pending.
        WorkflowNotFoundError: there is none; nothing was written.
        WorkflowNotResumableError: it was cancelled, or is a pipeline's run.
        UserError(DEFINITION_CHANGED): see `on_code_change`.
    """
    return _deliver(_resume(workflow_id, on_code_change))


def resume_async(workflow_id: str, *, on_code_change: Literal["accept", "rerun", "fail"] = "accept") -> Any:
    """As `resume`, without waiting: an object reference to the output."""
    return _output_ref(_resume(workflow_id, on_code_change), None)


def fork(workflow_id: str, from_step: str, *, new_workflow_id: str | None = None) -> tuple[str, Any]:
    """Run a workflow again from one of its steps on, under another id, and wait for its output.

    All finished steps are taken over but `from_step` and what depends on it. Their values are copied: the first
    workflow stays as it is, and may be deleted. It may be in any state, running ones included.

    Args:
        from_step: task id of the step to execute again, finished or not.
        new_workflow_id: 1 to 200 characters; default: a new one.

    Returns:
        (id of the new workflow, its output).

    Raises:
        WorkflowNotFoundError: there is no such workflow.
        ValueError: it has no such step.
        UserError: USAGE_INVALID, it is a pipeline's run; RUN_EXISTS, the new id is taken; RUN_ID_INVALID.
        queue.Full, WorkflowExecutionError, WorkflowCancellationError: as `run`.
    """
    new_id = _fork(workflow_id, from_step, new_workflow_id)
    return new_id, _deliver(new_id)


def fork_async(workflow_id: str, from_step: str, *, new_workflow_id: str | None = None) -> tuple[str, Any]:
    """As `fork`, without waiting: the id of the new workflow, and an object reference to its output."""
    new_id = _fork(workflow_id, from_step, new_workflow_id)
    return new_id, _output_ref(new_id, None)


def resume_all(include_failed: bool = False) -> list[tuple[str, Any]]:
    """Take up all workflows that nobody runs, those first that were running.

    One that cannot be resumed is logged, with the reason, and does not keep the others.

    Args:
        include_failed: the FAILED ones too.

    Returns:
        (workflow id, object reference to the output) of those that were taken up.
    """
    wanted = {RunStatus.RESUMABLE} | ({RunStatus.FAILED} if include_failed else set())
    states = [state for state in list_runs(_store()) if state.status in wanted and _is_workflow(state)]
    found = []
    for state in sorted(states, key=lambda state: (state.owner is None, state.created_at)):
        try:
            found.append((state.run_id, resume_async(state.run_id)))
        except (VerlWorkflowError, RuntimeError) as error:
            _log.warning("workflow %s is not resumed: %s", state.run_id, error)
    return found


def get_output(workflow_id: str, *, task_id: str | None = None) -> Any:
    """Wait for the output of a workflow, or of one of its steps. Needs no Ray, and no code but that of the value.

    Raises:
        WorkflowNotFoundError: there is no such workflow.
        ValueError: it has ended without such a step, or the step's value was not kept (``checkpoint=False``).
        WorkflowExecutionError, WorkflowCancellationError: it has ended without the value.
        VerlWorkflowError(JOURNAL_DAMAGED): the value is not what was recorded, or can be loaded no more.
    """
    return await_output(_store(), _existing(workflow_id).run_id, task_id)


def get_output_async(workflow_id: str, *, task_id: str | None = None) -> Any:
    """As `get_output`, without waiting: an object reference to the value."""
    return _output_ref(_existing(workflow_id).run_id, task_id)


def list_all(
    status_filter: WorkflowStatus | str | set[WorkflowStatus] | set[str] | None = None,
) -> list[tuple[str, WorkflowStatus]]:
    """All workflows with their status, sorted by id; RESUMABLE ones that were running before those that were pending.

    A workflow whose record is damaged is there too, and keeps no other from being seen.

    Raises:
        TypeError, ValueError: the filter is no status or set of them.
    """
    wanted = _wanted(status_filter)
    found = [(state, WorkflowStatus.of(state.status)) for state in list_runs(_store()) if _is_workflow(state)]
    kept = [(state, status) for state, status in found if status in wanted]
    kept.sort(key=lambda each: each[1] is WorkflowStatus.RESUMABLE and each[0].owner is None)
    return [(state.run_id, status) for state, status in kept]


def get_status(workflow_id: str) -> WorkflowStatus:
    """Where a workflow stands.

    Raises:
        WorkflowNotFoundError: there is none.
        VerlWorkflowError(JOURNAL_DAMAGED): its record cannot be read; says which file, and what to do.
    """
    return WorkflowStatus.of(_existing(workflow_id).status)


def get_metadata(workflow_id: str, task_id: str | None = None) -> dict[str, Any]:
    """What is known of a workflow, or of a step.

    Returns:
        Of a workflow: ``status``, ``user_metadata``, ``stats`` (``start_time`` and ``end_time``, seconds since 1970;
        those that are known). Of a step: ``task_id``, ``task_options``, ``user_metadata``, ``workflow_refs`` (the
        steps it waits for), ``stats``, and ``attempts``: a dict each, with ``number``, ``status``, ``start_time``,
        ``end_time`` and ``error``.

    Raises:
        ValueError: there is no such workflow, or no such step in it.
    """
    if not run_exists(_store(), workflow_id):
        raise ValueError(f"No such workflow_id '{workflow_id}'")
    state = read_run(_store(), workflow_id, progress=False)
    if task_id is not None:
        return _step_metadata(state, task_id)
    started = next(iter(sorted(a.started_at for step in state.steps.values() for a in step.attempts)), state.created_at)
    return {
        "status": WorkflowStatus.of(state.status).value,
        "user_metadata": state.definition.get("workflow", {}).get("metadata", {}),
        "stats": _stats(started, state.ended_at),
    }


def cancel(workflow_id: str) -> None:
    """Stop a workflow: its running steps are ended, and it is CANCELED when this returns. What was committed stays.

    To cancel a cancelled workflow is no error. One that has ended otherwise keeps its end.

    Raises:
        WorkflowNotFoundError: there is none; nothing was written.
        UserError(RUN_TERMINAL): it has succeeded or failed.
        TimeoutError: its driver has not stopped it within a minute.
    """
    state = _existing(workflow_id)
    store = _store()
    if state.status is RunStatus.PENDING and state.host is not None:
        # Out of the queue first, or it would begin in between.
        _withdraw(workflow_id)
    request_cancel(store, workflow_id)
    deadline = time.monotonic() + 60.0
    while read_run(store, workflow_id, progress=False).status not in TERMINAL_STATES:
        if time.monotonic() > deadline:
            raise TimeoutError(f"Workflow '{workflow_id}' was asked to stop, and has not within 60 s.")
        time.sleep(_POLL_S)


def send_event(workflow_id: str, event_key: str, payload: Any = None) -> None:
    """Send an event to a workflow from outside, for a `StorageListener` or `HTTPListener` there; needs no Ray.

    It is kept until the workflow asks for it. To send the same one again is no error.

    Args:
        event_key: 1 to 200 characters; equal ones of two workflows are two events. payload: plain JSON.

    Raises:
        WorkflowNotFoundError: there is no such workflow.
        UserError: EVENT_CONFLICT, another payload was sent under this key; DATA_INVALID, it is no JSON; USAGE_INVALID,
            the key cannot be one.
    """
    from verl_workflow.workflow._sent_events import store_event

    try:
        store_event(_store(), workflow_id, event_key, payload)
    except UserError as error:
        if error.code is not ErrorCode.RUN_UNKNOWN:
            raise
        raise WorkflowNotFoundError.of(workflow_id, _store().uri) from error


def serve_events(*, host: str = "127.0.0.1", port: int = 8000, route_prefix: str = "/event") -> str:
    """Take events in over HTTP, by an application of Ray Serve on the connected cluster; returns its address.

    ``POST <address>/send_event/<workflow id>`` with ``{"event_key": ..., "event_payload": ...}`` does what `send_event`
    does: 200 when the event is stored, 400: the body is none; 404: there is no such workflow; 409: it has another
    payload under this key; 503: the storage fails.

    Args:
        host, port: what Serve listens on, if it does not run yet; else they have to be those it listens on. Whoever
            reaches them may send events: there is no authentication, hence the loopback address.

    Raises:
        UserError: DEPENDENCY_MISSING, Ray Serve is not installed; USAGE_INVALID, it runs and listens elsewhere.
    """
    try:
        import ray.serve  # noqa: F401

        from verl_workflow.workflow._http_events import deploy_events
    except ImportError as error:
        raise UserError(
            ErrorCode.DEPENDENCY_MISSING,
            f"taking events in over HTTP needs Ray Serve ({error})",
            remedy='Install it with: uv pip install "verl-workflow[serve]".',
        ) from error
    return deploy_events(_store(), host=host, port=port, route_prefix=route_prefix)


def delete(workflow_id: str) -> None:
    """Remove a workflow with all it has stored.

    Raises:
        WorkflowStillActiveError: it is running or pending.
        WorkflowNotFoundError: there is none.
    """
    try:
        state = _existing(workflow_id)
    except WorkflowNotFoundError:
        raise
    except VerlWorkflowError as error:
        # What is damaged may be removed.
        if error.code is not ErrorCode.JOURNAL_DAMAGED:
            raise
        state = RunState(run_id=workflow_id, status=RunStatus.DAMAGED)
    if state.status in {RunStatus.RUNNING, RunStatus.PENDING}:
        raise WorkflowStillActiveError.of("DELETE", workflow_id)
    _store().delete_folder(run_folder(workflow_id), first=f"{run_folder(workflow_id)}/definition.json")


def gc(workflow_id: str | None = None) -> Collected:
    """Remove what workflows, and runs of pipelines, need no more. Safe beside anything else, and at any crash.

    Those that have ended more than an hour ago keep no journal but its sum, and of values, graphs and objects those
    that belong to a result; all others lose superseded snapshots alone. Status, outputs, metadata stay as they are.

    Args:
        workflow_id: of one workflow; None: all of the storage. One whose record is damaged is then left alone.

    Returns:
        How many files of each kind were removed, and their bytes.

    Raises:
        WorkflowNotFoundError: there is no such workflow.
        VerlWorkflowError(JOURNAL_DAMAGED): the record of this one cannot be read; nothing was removed.
    """
    from verl_workflow.workflow._gc import collect, collect_all

    if workflow_id is None:
        return collect_all(_store())
    try:
        return collect(_store(), workflow_id)
    except UserError as error:
        if error.code is not ErrorCode.RUN_UNKNOWN:
            raise
        raise WorkflowNotFoundError.of(workflow_id, _store().uri) from error


def continuation(dag_node: Any) -> Any:
    """Let a step go on with other steps: returned from it, the graph's value becomes the step's own.

    Outside of a workflow, the graph is executed by Ray at once, and its value is returned.

    Raises:
        TypeError: this is no graph.
    """
    from verl_workflow.workflow._dag import is_node

    if not is_node(dag_node):
        raise TypeError("Input should be a DAG.")
    if in_step():
        return dag_node
    from verl_workflow.workflow._direct import execute_directly

    return execute_directly(dag_node)


def _store() -> Store:
    return _client_of_process().store


def _client_of_process() -> Client:
    global _CLIENT
    if _CLIENT is None:
        _CLIENT = Client(Store(default_storage()))
    return _CLIENT


def _begin(
    dag: Any, args: tuple[Any, ...], kwargs: dict[str, Any], workflow_id: str | None, metadata: dict[str, Any] | None
) -> str:
    """Record a workflow and hand it to the host, or resume it; gives its id."""
    from verl_workflow.workflow._dag import DagView, is_node

    if not is_node(dag):
        raise TypeError("Input should be a DAG.")
    check_user_metadata(metadata)
    workflow_id = _new_id() if workflow_id is None else workflow_id
    check_name(workflow_id, "workflow_id", ErrorCode.RUN_ID_INVALID)
    store = _store()
    if run_exists(store, workflow_id):
        return _go_on(_existing(workflow_id), "accept")
    folder = run_folder(workflow_id)
    view = DagView(args, kwargs)
    graph = graph_of(dag, view, store, f"{folder}/objects", is_node=is_node, path=python_path())
    saved = save_graph(graph, store, workflow_id)
    root = Names().give(saved.names)[-1]
    record = {"graph": saved.graph_key, "sha256": saved.sha256, "root": root, "metadata": metadata or {}}
    _ask("begin", workflow_id, {"workflow": record}, uuid.uuid4().hex)
    return workflow_id


def _fork(workflow_id: str, from_step: str, new_id: str | None) -> str:
    """Record a fork and hand it to the host; gives its id."""
    from verl_workflow.workflow._fork import check_fork, copy_workflow

    state = _existing(workflow_id)
    new_id = _new_id() if new_id is None else new_id
    store = _store()
    check_fork(store, state, from_step, new_id)
    forked = copy_workflow(store, state, from_step, new_id)
    _ask("begin", new_id, forked.definition, uuid.uuid4().hex, forked.seed)
    return new_id


def _new_id() -> str:
    return f"{uuid.uuid4()}.{time.time():.9f}"


def _resume(workflow_id: str, on_code_change: str) -> str:
    if on_code_change not in ("accept", "rerun", "fail"):
        raise ValueError(f"on_code_change has to be accept, rerun or fail, not {on_code_change!r}.")
    return _go_on(_existing(workflow_id), on_code_change)


def _go_on(state: RunState, on_code_change: str) -> str:
    workflow_id = state.run_id
    if not _is_workflow(state):
        raise WorkflowNotResumableError.of(workflow_id, "it is a run of a pipeline (see `verl-workflow resume`)")
    if state.status in {RunStatus.RUNNING, RunStatus.PENDING}:
        raise RuntimeError(f"Workflow '{workflow_id}' is already running or pending.")
    if state.status is RunStatus.CANCELLED:
        raise WorkflowNotResumableError.of(workflow_id, "it was cancelled")
    if state.status is not RunStatus.SUCCEEDED:
        from verl_workflow.workflow._guard import changed_steps

        reset = changed_steps(state, _store(), on_code_change)
        _ask("submit", workflow_id, reset)
    return workflow_id


def _existing(workflow_id: str) -> RunState:
    check_name(workflow_id, "workflow_id", ErrorCode.RUN_ID_INVALID)
    if not run_exists(_store(), workflow_id):
        raise WorkflowNotFoundError.of(workflow_id, _store().uri)
    return read_run(_store(), workflow_id, progress=False)


def _is_workflow(state: RunState) -> bool:
    return "workflow" in state.definition or state.status is RunStatus.DAMAGED


def _ask(method: str, *args: Any) -> Any:
    """Call a method of the host, of a new one if it was ended. What it raises is raised as itself, unwrapped."""
    import ray

    client = _client_of_process()
    for last in (False, True):
        try:
            return ray.get(getattr(client.host(), method).remote(*args))
        except ray.exceptions.RayTaskError as error:
            raise error.cause from error
        except ray.exceptions.ActorDiedError:
            client.forget()
            if last:
                raise
    raise AssertionError("not reached")


def _withdraw(workflow_id: str) -> None:
    import ray

    if ray.is_initialized():
        _ask("withdraw", workflow_id)


def _deliver(workflow_id: str) -> Any:
    # What has ended before needs no cluster.
    stopped = _ask("wait", workflow_id) if _client_of_process().is_met else None
    # A driver that has lost the workflow to another one has not ended it: that one will.
    if stopped is not None and not isinstance(stopped, FencedError):
        raise stopped
    return await_output(_store(), workflow_id, None)


def _output_ref(workflow_id: str, task_id: str | None) -> Any:
    """A reference to what `get_output` gives; the host waits for it, and holds no worker for that."""
    return _client_of_process().host().output.remote(workflow_id, task_id)


def _step_metadata(state: RunState, task_id: str) -> dict[str, Any]:
    from verl_workflow.workflow._metadata import node_of

    found = node_of(state, task_id, _store())
    if found is None:
        raise ValueError(f"No such task_id '{task_id}' in workflow '{state.run_id}'")
    options, after = found
    step = state.steps.get(task_id)
    attempts = step.attempts if step is not None else ()
    return {
        "task_id": task_id,
        "task_options": {
            "task_type": "FUNCTION",
            "max_retries": options.max_retries,
            "catch_exceptions": bool(options.catch_exceptions),
            "retry_exceptions": bool(options.retry_exceptions),
            "checkpoint": options.checkpoint is not False,
            "ray_options": dict(options.ray),
        },
        "user_metadata": dict(options.metadata),
        "workflow_refs": list(after),
        "stats": _stats(attempts[0].started_at if attempts else None, attempts[-1].ended_at if attempts else None),
        "attempts": [
            {
                "number": each.number,
                "status": each.status.value,
                "start_time": each.started_at,
                "end_time": each.ended_at,
                "error": None if each.error is None else each.error.get("message"),
            }
            for each in attempts
        ],
    }


def _stats(started: float | None, ended: float | None) -> dict[str, float]:
    known = {"start_time": started, "end_time": ended}
    return {name: at for name, at in known.items() if at is not None}


def _wanted(status_filter: object) -> set[WorkflowStatus]:
    if status_filter is None:
        return set(WorkflowStatus)
    if isinstance(status_filter, str):
        return {WorkflowStatus(status_filter)}
    if not isinstance(status_filter, (set, frozenset)) or not all(isinstance(each, str) for each in status_filter):
        raise TypeError("status_filter must be WorkflowStatus or a set of WorkflowStatus.")
    return {WorkflowStatus(each) for each in status_filter}


def _check_limit(name: str, limit: object, *, least: int) -> None:
    if limit is None:
        return
    if not isinstance(limit, int) or isinstance(limit, bool):
        raise TypeError(f"'{name}' must be None or an integer.")
    if limit != -1 and limit < least:
        kind = "positive" if least else "non-negative"
        raise ValueError(f"'{name}' must be a {kind} integer or use -1 as infinity.")
