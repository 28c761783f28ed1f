"""The output of a workflow or of one of its steps, waited for in the storage: whoever drives it may be anywhere."""

from __future__ import annotations

import asyncio
import base64
import logging
import time
from collections.abc import Iterator, Mapping
from typing import Any

from verl_workflow.errors import ErrorCode, UserError, VerlWorkflowError
from verl_workflow.storage import Store
from verl_workflow.workflow._exceptions import WorkflowCancellationError, WorkflowExecutionError, WorkflowNotFoundError
from verl_workflow.workflow._fold import RunStatus, StepStatus
from verl_workflow.workflow._heartbeat import LEASE_S, read_heartbeat
from verl_workflow.workflow._names import RunKey
from verl_workflow.workflow._pickling import loads
from verl_workflow.workflow._state import RunState, StepState, read_run
from verl_workflow.workflow._values import Value

_ELSEWHERE = frozenset({ErrorCode.FENCED, ErrorCode.RUN_TERMINAL, ErrorCode.RUN_OWNED})
_POLL_S = 0.05
_LONGEST_POLL_S = 1.0
_log = logging.getLogger(__name__)


class Delivered:
    """A value on its way to whoever asked for it: read from the storage when it is unpickled there, not before."""

    def __init__(self, store: Store, run: RunKey, step: str, value: Value) -> None:
        self._parts = store, run, step, value

    def __reduce__(self) -> tuple[Any, ...]:
        return _load, self._parts


def is_elsewhere(stopped: BaseException) -> bool:
    """Whether a driver stopped because the workflow had been ended, or was being driven, by somebody else."""
    return isinstance(stopped, VerlWorkflowError) and stopped.code in _ELSEWHERE


def await_output(store: Store, run: RunKey, task_id: str | None) -> Any:
    """The value, once it is there. Raises as `get_output`."""
    look = _Look(store, run, task_id)
    for pause in _pauses():
        found = look()
        if found is not None:
            return _load(store, run, *found)
        time.sleep(pause)
    raise AssertionError("the pauses have no end")


async def output_to_deliver(store: Store, run: RunKey, task_id: str | None, *, here: bool) -> Delivered:
    """As `await_output`, for another process.

    Args:
        here: this process drives the run, or will.
    """
    look = _Look(store, run, task_id, expected=here)
    for pause in _pauses():
        found = await asyncio.to_thread(look)
        if found is not None:
            return Delivered(store, run, *found)
        await asyncio.sleep(pause)
    raise AssertionError("the pauses have no end")


class _Look:
    """Each call looks whether the value is there, and gives its step and itself; None when it may still come.

    Args:
        expected: somebody drives the run, or is about to. A host that has died comes back by itself, in a few seconds.
    """

    def __init__(self, store: Store, run: RunKey, task_id: str | None, *, expected: bool = False) -> None:
        self._store, self._run, self._task_id = store, run, task_id
        self._driven_at = time.monotonic() if expected else float("-inf")

    def __call__(self) -> tuple[str, Value] | None:
        state = _present(self._store, self._run)
        step = _settled(state, self._task_id, self._store)
        if step is not None:
            assert step.committed is not None and step.committed.value is not None
            return step.name, step.committed.value
        if state.status is not RunStatus.RESUMABLE or self._was_lost(state):
            self._driven_at = time.monotonic()
        elif time.monotonic() - self._driven_at > LEASE_S:
            raise ValueError(
                f"Cannot load output from workflow '{state.run_id}': nobody runs it. Go on with "
                f"workflow.resume({state.run_id!r})."
            )
        return None

    def _was_lost(self, state: RunState) -> bool:
        """Whether its driver was alive a moment ago, and has not said that it stops."""
        beat = read_heartbeat(self._store, self._run)
        return beat is not None and not beat.get("released") and (state.heartbeat_age_s or LEASE_S) < LEASE_S


def _present(store: Store, run: RunKey) -> RunState:
    """The run as it stands. Raises WorkflowNotFoundError when it was deleted, whatever bears its id now."""
    try:
        state = read_run(store, run.run_id, progress=False)
    except UserError as error:
        if error.code is not ErrorCode.RUN_UNKNOWN:
            raise
        raise WorkflowNotFoundError.of(run.run_id, store.uri) from error
    if state.key != run:
        raise WorkflowNotFoundError.of(run.run_id, store.uri)
    return state


def _pauses() -> Iterator[float]:
    pause = _POLL_S
    while True:
        yield pause
        pause = min(pause * 1.5, _LONGEST_POLL_S)


def _settled(state: RunState, task_id: str | None, store: Store) -> StepState | None:
    """The step that has the value, None when it may still come; raises when it will not."""
    workflow_id = state.run_id
    name = task_id if task_id is not None else _output_step(state)
    source = state.steps.get(name)
    while source is not None and source.status is StepStatus.CONTINUED and source.continued_to is not None:
        source = state.steps[source.continued_to]
    if source is not None and source.kept:
        return source
    if source is not None and source.committed is not None:
        raise ValueError(
            f"Cannot load output from task id '{name}' in workflow '{workflow_id}': it was not kept (checkpoint=False)"
        )
    if state.status is RunStatus.FAILED:
        raise _failure(state) from _cause(state, store)
    if state.status is RunStatus.CANCELLED:
        raise WorkflowCancellationError.of(workflow_id)
    if state.status is RunStatus.SUCCEEDED:
        raise ValueError(f"No such task_id '{task_id}' in workflow '{workflow_id}'")
    return None


def _load(store: Store, run: RunKey, step: str, value: Value) -> Any:
    try:
        return value.load(store, step)
    except VerlWorkflowError as error:
        problem = error
    if problem.code is ErrorCode.JOURNAL_DAMAGED:
        # Nothing is wrong with it if the run was deleted meanwhile.
        _present(store, run)
    raise problem


def _output_step(state: RunState) -> str:
    if "workflow" not in state.definition:
        raise ValueError(f"'{state.run_id}' is a run of a pipeline: name one of its stages as task_id.")
    return str(state.definition["workflow"]["root"])


def _failure(state: RunState) -> WorkflowExecutionError:
    error = state.error or {}
    return WorkflowExecutionError.of(state.run_id, f"Step {error.get('step')}: {error.get('what')}")


def _cause(state: RunState, store: Store) -> BaseException:
    """The exception that the step raised; what is left of it when its class cannot be loaded here."""
    error: Mapping[str, Any] = state.error or {}
    if "pickle" in error:
        try:
            found = loads(base64.b64decode(error["pickle"]), store)
            assert isinstance(found, BaseException)
        except Exception as problem:  # noqa: BLE001 - loading calls the user's own classes
            _log.info("the error of %s cannot be loaded here: %s", state.run_id, problem)
        else:
            return found
    return VerlWorkflowError(
        ErrorCode(error.get("code", "step_failed")),
        str(error.get("what", "")),
        where=str(error.get("where", "")),
        remedy=str(error.get("remedy", "")),
        retryable=bool(error.get("retryable", False)),
    )
