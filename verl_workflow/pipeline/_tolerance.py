"""Members of a matrix that may fail: what stands in for their result, and for that of what would have used it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from verl_workflow.errors import ErrorCode, FencedError, UserError, VerlWorkflowError
from verl_workflow.spec import VerlStage
from verl_workflow.spec._stage import MatrixStage

_MEMBER = "failed_member"


def failure_of(value: Any) -> Mapping[str, Any] | None:
    """Why a member failed (`VerlWorkflowError.to_json`), when this stands in for its result."""
    if isinstance(value, Mapping) and value.keys() == {_MEMBER, "error"} and isinstance(value["error"], Mapping):
        return value["error"]
    return None


def stand_in(member: str, error: Mapping[str, Any]) -> dict[str, Any]:
    """What is recorded as the result of a member that failed and may."""
    return {_MEMBER: member, "error": dict(error)}


def passed_over(inputs: Mapping[str, Any]) -> Any | None:
    """The result of a stage that would need that of a failed member: the same failure; None when it can run."""
    return next((value for value in inputs.values() if failure_of(value) is not None), None)


def tolerant(
    stage: MatrixStage, attempt: int, run: Callable[[], Any], report: Callable[[Mapping[str, Any]], None]
) -> Any:
    """What the member comes to: the value of `run`, or what stands in for it when no attempt will follow.

    Args:
        attempt: its number. A verl stage says of each failure whether another attempt follows; others are tried until
            their attempts, those of lost drivers included, are used up.
        report: is told of the failure, for whoever watches.

    Raises:
        Exception: of `run`, when another attempt follows, or when another driver has taken the run over.
    """
    try:
        return run()
    except FencedError:
        raise
    except Exception as error:
        told = error if isinstance(error, VerlWorkflowError) else _unforeseen(error)
        again = told.retryable and not isinstance(error, UserError)
        if again and (isinstance(stage, VerlStage) or attempt < stage.retry.attempts):
            raise
        found = told.to_json()
        report({"phase": "failed", "tolerated": found})
        return stand_in(stage.name, found)


def _unforeseen(error: Exception) -> VerlWorkflowError:
    return VerlWorkflowError(ErrorCode.STEP_FAILED, f"{type(error).__name__}: {error}", retryable=True)
