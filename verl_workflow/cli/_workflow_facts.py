"""A workflow or a pipeline's run, as `ray-workflow` tells it; and what it makes of the errors of the workflow API."""

from __future__ import annotations

import math
import queue
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, Any

import typer

from verl_workflow.cli import _options
from verl_workflow.cli._words import duration
from verl_workflow.errors import ErrorCode, UserError, VerlWorkflowError

if TYPE_CHECKING:
    from verl_workflow.storage import Store
    from verl_workflow.workflow import RunState, StepState

WorkflowId = Annotated[str, typer.Argument(metavar="ID", help="Id of the workflow or run.", show_default=False)]
Task = Annotated[
    str | None, typer.Option("--task", metavar="TASK", help="One of its steps, by task id.", show_default=False)
]


def open_workflow(storage: str | None, workflow_id: str) -> tuple[Store, RunState]:
    """The storage asked for, settled as the one of the workflow API too, and the state of a run in it.

    Raises:
        UserError: RUN_UNKNOWN or RUN_ID_INVALID; nothing has been written.
        VerlWorkflowError(JOURNAL_DAMAGED): its record cannot be read.
    """
    from verl_workflow import workflow
    from verl_workflow.cli._find import find_run

    store, state = find_run(storage, workflow_id, any_kind=True)
    workflow.init(storage=store.uri)
    return store, state


def open_storage(storage: str | None) -> Store:
    """The storage asked for, settled as the one of the workflow API too."""
    from verl_workflow import workflow
    from verl_workflow.storage import Store

    store = Store(_options.storage_of(storage))
    workflow.init(storage=store.uri)
    return store


def is_pipeline(state: RunState) -> bool:
    """Whether this is the run of a pipeline, not a workflow."""
    return "pipeline" in state.definition


def kind_of(state: RunState) -> str:
    if is_pipeline(state):
        return "pipeline"
    # A record that cannot be read says no more about that either.
    return "workflow" if "workflow" in state.definition else "unknown"


def status_word(state: RunState) -> str:
    from verl_workflow.workflow import WorkflowStatus

    return WorkflowStatus.of(state.status).value


def brief_json(state: RunState) -> dict[str, Any]:
    """What `list` tells of a run."""
    return {
        "workflow_id": state.run_id,
        "kind": kind_of(state),
        "status": status_word(state),
        "created_at": state.created_at,
        "ended_at": state.ended_at,
        "elapsed_seconds": elapsed(state),
        "error": _told_error(state.error),
    }


def full_json(state: RunState, storage: str) -> dict[str, Any]:
    """What `status` tells of a run, and `resume` of what it came to."""
    return {
        **brief_json(state),
        "storage": storage,
        "cancel_requested": state.cancel_requested,
        "driver": {"owner": state.owner, "epoch": state.epoch, "heartbeat_age_seconds": state.heartbeat_age_s},
        "tasks": [_step_json(step) for step in state.steps.values()],
    }


def summary(state: RunState) -> list[str]:
    """The same in lines for people."""
    lines = [f"{kind_of(state)} {state.run_id}: {status_word(state)} after {duration(elapsed(state))}"]
    width = max((len(name) for name in state.steps), default=0)
    lines += [f"  {name:<{width}}  {_step_words(step)}" for name, step in state.steps.items()]
    return lines


def elapsed(state: RunState) -> float | None:
    """Seconds from the record to the end, or to the last sign of life; None when they are not known."""
    running = state.status.value == "running"
    last = state.ended_at or (time.time() if running else state.updated_at)
    return None if last is None or state.created_at is None else max(0.0, last - state.created_at)


def plain(value: Any) -> Any:
    """`value` as JSON can hold it: what it cannot is shown by its repr."""
    if isinstance(value, Mapping):
        return {str(name): plain(item) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    return value if value is None or isinstance(value, (str, int, float, bool)) else shown(value)


# Of what is in a list or dict.
_END = object()
# Python writes no longer numbers in decimal: sys.get_int_max_str_digits.
_LONGEST_INT_BITS = 14_000


def is_plain_json(value: Any) -> bool:
    """Whether JSON says all there is to the value: no tuples, no other keys than texts, no infinite numbers, nothing
    that holds itself.
    """
    left, inside = [value], dict[int, None]()
    while left:
        found = left.pop()
        if found is _END:
            inside.popitem()
            continue
        if type(found) in {dict, list}:
            if id(found) in inside:
                return False
            inside[id(found)] = None
            left.append(_END)
        if type(found) is dict:
            if not all(type(name) is str for name in found):
                return False
            left.extend(found.values())
        elif type(found) is list:
            left.extend(found)
        elif type(found) is float:
            if not math.isfinite(found):
                return False
        elif type(found) is int:
            if found.bit_length() > _LONGEST_INT_BITS:
                return False
        elif found is not None and type(found) not in {str, bool}:
            return False
    return True


def shown(value: Any) -> str:
    """A value's repr, or what is wrong with it."""
    try:
        return repr(value)
    except Exception as error:  # noqa: BLE001 - the user's own __repr__
        return f"<{type(value).__name__}, whose repr raises {type(error).__name__}>"


@contextmanager
def api_errors(workflow_id: str) -> Iterator[None]:
    """Raise what the workflow API raises of a user's mistake as a `UserError`, for exit code 2 and its message."""
    from verl_workflow.workflow import (
        WorkflowNotFoundError,
        WorkflowNotResumableError,
        WorkflowStillActiveError,
    )

    try:
        yield
    except (WorkflowNotFoundError, WorkflowNotResumableError, WorkflowStillActiveError) as error:
        raise UserError(error.code, error.what, remedy=error.remedy) from error
    except queue.Full as error:
        what = "the cluster has as many workflows waiting as it may have"
        raise VerlWorkflowError(
            ErrorCode.CAPACITY, what, where=workflow_id, remedy="Try again when some have ended.", retryable=True
        ) from error
    except VerlWorkflowError:
        raise
    except ValueError as error:
        raise UserError(ErrorCode.USAGE_INVALID, str(error).rstrip("."), where=workflow_id) from error


def _told_error(error: Mapping[str, Any] | None) -> dict[str, Any] | None:
    # The pickle is for those who load the exception.
    return None if error is None else {name: value for name, value in error.items() if name != "pickle"}


def _step_json(step: StepState) -> dict[str, Any]:
    last = step.attempts[-1] if step.attempts else None
    return {
        "task_id": step.name,
        "status": step.status.value,
        "attempts": len(step.attempts),
        "started_at": step.attempts[0].started_at if last is not None else None,
        "ended_at": None if last is None else last.ended_at,
        "continued_to": step.continued_to,
        "reused_from": step.reused_from,
        "error": _told_error(last.error) if last is not None and step.status.value != "succeeded" else None,
    }


def _step_words(step: StepState) -> str:
    status = step.status.value
    last = step.attempts[-1] if step.attempts else None
    if status == "continued":
        return f"continued to {step.continued_to}"
    if last is None:
        return f"{status}, taken over from {step.reused_from}" if step.reused_from else status
    words = f"{status} in attempt {last.number}"
    if status == "succeeded" and last.ended_at is not None:
        words += f" ({duration(last.ended_at - last.started_at)})"
    elif last.error is not None:
        words += f": {last.error.get('message', '')}"
    return words
