"""The output of a workflow or of one of its steps, waited for in the storage: whoever drives it may be anywhere."""

from __future__ import annotations

import asyncio
import base64
import logging
import time
from collections.abc import Iterator, Mapping
from typing import Any

from verl_workflow.errors import ErrorCode, VerlWorkflowError
from verl_workflow.storage import Store
from verl_workflow.workflow._exceptions import WorkflowCancellationError, WorkflowExecutionError
from verl_workflow.workflow._fold import RunStatus, StepStatus
from verl_workflow.workflow._state import RunState, StepState, read_run
from verl_workflow.workflow._values import Value

_ELSEWHERE = frozenset({ErrorCode.FENCED, ErrorCode.RUN_TERMINAL, ErrorCode.RUN_OWNED})
_POLL_S = 0.05
_LONGEST_POLL_S = 1.0
_log = logging.getLogger(__name__)


class Delivered:
    """A value on its way to whoever asked for it: read from the storage when it is unpickled there, not before."""

    def __init__(self, store: Store, step: str, value: Value) -> None:
        self._parts = store, step, value

    def __reduce__(self) -> tuple[Any, ...]:
        return _load, self._parts


def is_elsewhere(stopped: BaseException) -> bool:
    """Whether a driver stopped because the workflow had been ended, or was being driven, by somebody else."""
    return isinstance(stopped, VerlWorkflowError) and stopped.code in _ELSEWHERE


def await_output(store: Store, workflow_id: str, task_id: str | None) -> Any:
    """The value, once it is there. Raises as `get_output`."""
    for pause in _pauses():
        state = read_run(store, workflow_id, progress=False)
        step = _settled(state, task_id)
        if step is not None:
            return step.value
        time.sleep(pause)
    raise AssertionError("the pauses have no end")


async def output_to_deliver(store: Store, workflow_id: str, task_id: str | None) -> Delivered:
    """As `await_output`, for another process."""
    for pause in _pauses():
        state = await asyncio.to_thread(read_run, store, workflow_id, progress=False)
        step = _settled(state, task_id)
        if step is not None:
            assert step.committed is not None and step.committed.value is not None
            return Delivered(store, step.name, step.committed.value)
        await asyncio.sleep(pause)
    raise AssertionError("the pauses have no end")


def _pauses() -> Iterator[float]:
    pause = _POLL_S
    while True:
        yield pause
        pause = min(pause * 1.5, _LONGEST_POLL_S)


def _settled(state: RunState, task_id: str | None) -> StepState | None:
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
        raise _failure(state) from _cause(state)
    if state.status is RunStatus.CANCELLED:
        raise WorkflowCancellationError.of(workflow_id)
    if state.status is RunStatus.SUCCEEDED:
        raise ValueError(f"No such task_id '{task_id}' in workflow '{workflow_id}'")
    if state.status is RunStatus.RESUMABLE:
        raise ValueError(
            f"Cannot load output from workflow '{workflow_id}': nobody runs it. Go on with "
            f"workflow.resume({workflow_id!r})."
        )
    return None


def _load(store: Store, step: str, value: Value) -> Any:
    return value.load(store, step)


def _output_step(state: RunState) -> str:
    if "workflow" not in state.definition:
        raise ValueError(f"'{state.run_id}' is a run of a pipeline: name one of its stages as task_id.")
    return str(state.definition["workflow"]["root"])


def _failure(state: RunState) -> WorkflowExecutionError:
    error = state.error or {}
    return WorkflowExecutionError.of(state.run_id, f"Step {error.get('step')}: {error.get('what')}")


def _cause(state: RunState) -> BaseException:
    """The exception that the step raised; what is left of it when its class cannot be loaded here."""
    error: Mapping[str, Any] = state.error or {}
    if "pickle" in error:
        import pickle

        try:
            found = pickle.loads(base64.b64decode(error["pickle"]))
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
