"""The functions of ray.workflow, on today's Ray, but for those that end workflows and clear them away."""

from __future__ import annotations

import logging
import os
import queue
from typing import Any, Literal

from verl_workflow.errors import ErrorCode, UserError, VerlWorkflowError
from verl_workflow.storage import Store
from verl_workflow.workflow import _session
from verl_workflow.workflow._client import Client, default_storage
from verl_workflow.workflow._exceptions import WorkflowNotFoundError
from verl_workflow.workflow._fold import RunStatus
from verl_workflow.workflow._metadata import stats, step_metadata
from verl_workflow.workflow._names import check_name
from verl_workflow.workflow._node import in_step
from verl_workflow.workflow._outputs import await_output
from verl_workflow.workflow._state import RunState, list_runs
from verl_workflow.workflow._status import WorkflowStatus

_log = logging.getLogger(__name__)


def init(
    *,
    storage: str | os.PathLike[str] | None = None,
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
            on a local disk, for which each write then waits. Default ``VERL_WORKFLOW_DURABILITY``, or ``process``.

    Raises:
        TypeError, ValueError: a limit is no whole number, or none that makes sense, or not the one that the running
            host was started with.
    """
    _check_limit("max_running_workflows", max_running_workflows, least=1)
    _check_limit("max_pending_workflows", max_pending_workflows, least=0)
    store = Store(os.fspath(storage or default_storage()), durability=durability)
    found = Client(store, max_running_workflows, max_pending_workflows, durability)
    if max_running_workflows is not None or max_pending_workflows is not None:
        # To be told now, not by the first workflow; one that is refused changes nothing.
        found.host()
    _session.use(found)


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
    return _session.deliver(_session.begin_workflow(dag, args, kwargs, workflow_id, metadata))


def run_async(
    dag: Any, *args: Any, workflow_id: str | None = None, metadata: dict[str, Any] | None = None, **kwargs: Any
) -> Any:
    """As `run`, without waiting: an object reference to the output."""
    return _session.output_ref(_session.begin_workflow(dag, args, kwargs, workflow_id, metadata))


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
    return _session.deliver(_session.take_up(workflow_id, on_code_change))


def resume_async(workflow_id: str, *, on_code_change: Literal["accept", "rerun", "fail"] = "accept") -> Any:
    """As `resume`, without waiting: an object reference to the output."""
    return _session.output_ref(_session.take_up(workflow_id, on_code_change))


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
    new = _session.begin_fork(workflow_id, from_step, new_workflow_id)
    return new.run.run_id, _session.deliver(new)


def fork_async(workflow_id: str, from_step: str, *, new_workflow_id: str | None = None) -> tuple[str, Any]:
    """As `fork`, without waiting: the id of the new workflow, and an object reference to its output."""
    new = _session.begin_fork(workflow_id, from_step, new_workflow_id)
    return new.run.run_id, _session.output_ref(new)


def resume_all(include_failed: bool = False) -> list[tuple[str, Any]]:
    """Take up all workflows that nobody runs, those first that were running.

    One that cannot be resumed is logged, with the reason, and does not keep the others.

    Args:
        include_failed: the FAILED ones too.

    Returns:
        (workflow id, object reference to the output) of those that were taken up.
    """
    wanted = {RunStatus.RESUMABLE} | ({RunStatus.FAILED} if include_failed else set())
    states = [state for state in _workflows() if state.status in wanted]
    found = []
    for state in sorted(states, key=lambda state: (state.owner is None, state.created_at)):
        try:
            found.append((state.run_id, resume_async(state.run_id)))
        except (VerlWorkflowError, RuntimeError, queue.Full) as error:
            _log.warning("workflow %s is not resumed: %s", state.run_id, error)
        except Exception as error:  # noqa: BLE001 - whatever is wrong with one of them is no reason to leave the others
            _log.warning("workflow %s is not resumed: %r", state.run_id, error, exc_info=True)
    return found


def get_output(workflow_id: str, *, task_id: str | None = None) -> Any:
    """Wait for the output of a workflow, or of one of its steps. Needs no Ray, and no code but that of the value.

    Object references in it are new ones, to equal values, which takes a cluster that this process has joined.

    Raises:
        WorkflowNotFoundError: there is no such workflow.
        ValueError: it has ended without such a step, or the step's value was not kept (``checkpoint=False``).
        WorkflowExecutionError, WorkflowCancellationError: it has ended without the value.
        VerlWorkflowError(JOURNAL_DAMAGED): the value is not what was recorded, or can be loaded no more.
        VerlWorkflowError(CLUSTER_UNREACHABLE): it holds references, and no cluster is joined.
    """
    return await_output(_session.storage(), _session.existing(workflow_id).key, task_id)


def get_output_async(workflow_id: str, *, task_id: str | None = None) -> Any:
    """As `get_output`, without waiting: an object reference to the value.

    What hinders its loading arrives as Ray's RaySystemError, with the error's text.
    """
    return _session.output_ref(_session.Asked(run=_session.existing(workflow_id).key), task_id)


def list_all(
    status_filter: WorkflowStatus | str | set[WorkflowStatus] | set[str] | None = None,
) -> list[tuple[str, WorkflowStatus]]:
    """All workflows with their status, sorted by id; RESUMABLE ones that were running before those that were pending.

    A workflow whose record is damaged is there too, and keeps no other from being seen.

    Raises:
        TypeError, ValueError: the filter is no status or set of them.
    """
    wanted = _wanted(status_filter)
    found = [(state, WorkflowStatus.of(state.status)) for state in _workflows()]
    kept = [(state, status) for state, status in found if status in wanted]
    kept.sort(key=lambda each: (each[1] is WorkflowStatus.RESUMABLE and each[0].owner is None, each[0].run_id))
    return [(state.run_id, status) for state, status in kept]


def get_status(workflow_id: str) -> WorkflowStatus:
    """Where a workflow stands.

    Raises:
        WorkflowNotFoundError: there is none.
        VerlWorkflowError(JOURNAL_DAMAGED): its record cannot be read; says which file, and what to do.
    """
    return WorkflowStatus.of(_session.existing(workflow_id).status)


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
    workflow_id = check_name(workflow_id, "workflow_id", ErrorCode.RUN_ID_INVALID)
    try:
        state = _session.existing(workflow_id)
        if task_id is not None:
            with _session.found(workflow_id, state.key):
                return step_metadata(state, task_id, _session.storage())
    except WorkflowNotFoundError as error:
        raise ValueError(f"No such workflow_id '{workflow_id}'") from error
    started = next(iter(sorted(a.started_at for step in state.steps.values() for a in step.attempts)), state.created_at)
    return {
        "status": WorkflowStatus.of(state.status).value,
        "user_metadata": state.definition.get("workflow", {}).get("metadata", {}),
        "stats": stats(started, state.ended_at),
    }


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

    with _session.found(workflow_id):
        store_event(_session.storage(), workflow_id, event_key, payload)


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
    return deploy_events(_session.storage(), host=host, port=port, route_prefix=route_prefix)


def continuation(dag_node: Any) -> Any:
    """Let a step go on with other steps: returned from it, the graph's value becomes the step's own.

    Outside of a workflow, the graph is executed by Ray at once, and its value is returned.

    Raises:
        TypeError: this is no graph, or one with an `InputNode`, for which there is nothing.
    """
    from verl_workflow.workflow._dag import is_node

    if not is_node(dag_node):
        raise TypeError("Input should be a DAG.")
    if in_step():
        return dag_node
    from verl_workflow.workflow._direct import execute_directly

    return execute_directly(dag_node)


def _workflows() -> list[RunState]:
    return [state for state in list_runs(_session.storage()) if _session.is_workflow(state)]


def _wanted(status_filter: object) -> set[WorkflowStatus]:
    if status_filter is None:
        return set(WorkflowStatus)
    if isinstance(status_filter, str):
        status_filter = {status_filter}
    if not isinstance(status_filter, (set, frozenset)) or not all(isinstance(each, str) for each in status_filter):
        raise TypeError("status_filter must be WorkflowStatus or a set of WorkflowStatus.")
    unknown = sorted(set(status_filter) - set(WorkflowStatus))
    if unknown:
        known = ", ".join(status.value for status in WorkflowStatus)
        raise ValueError(f"{', '.join(unknown)} is not a valid WorkflowStatus; those are {known}.")
    return {WorkflowStatus(each) for each in status_filter}


def _check_limit(name: str, limit: object, *, least: int) -> None:
    if limit is None:
        return
    if not isinstance(limit, int) or isinstance(limit, bool):
        raise TypeError(f"'{name}' must be None or an integer.")
    if limit != -1 and limit < least:
        kind = "positive" if least else "non-negative"
        raise ValueError(f"'{name}' must be a {kind} integer or use -1 as infinity.")
