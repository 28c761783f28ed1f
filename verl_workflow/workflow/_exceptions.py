"""What the functions of `verl_workflow.workflow` raise: the classes and first words that users of ray.workflow know."""

from __future__ import annotations

from typing import Any

from verl_workflow.errors import ErrorCode, VerlWorkflowError


class WorkflowError(VerlWorkflowError):
    """Base of the errors about one workflow."""

    CODE = ErrorCode.STEP_FAILED

    def __init__(self, what: str, remedy: str = "") -> None:
        super().__init__(self.CODE, what, remedy=remedy)

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (type(self), self.what, self.remedy)


class WorkflowExecutionError(WorkflowError):
    """The workflow has failed; the error of the step that failed is its ``__cause__``, where that could be loaded."""

    @classmethod
    def of(cls, workflow_id: str, why: str) -> WorkflowExecutionError:
        return cls(
            f"Workflow[id={workflow_id}] failed during execution. {why}".rstrip().rstrip("."),
            f"Mend the cause, and go on with workflow.resume({workflow_id!r}).",
        )


class WorkflowCancellationError(WorkflowError):
    """The workflow was cancelled while somebody waited for it."""

    CODE = ErrorCode.CANCELLED

    @classmethod
    def of(cls, workflow_id: str) -> WorkflowCancellationError:
        return cls(f"Workflow[id={workflow_id}] is cancelled during execution.".rstrip("."))


class WorkflowNotResumableError(WorkflowError):
    """The workflow was cancelled, and cannot be resumed."""

    CODE = ErrorCode.RUN_TERMINAL

    @classmethod
    def of(cls, workflow_id: str, why: str) -> WorkflowNotResumableError:
        return cls(f"Workflow[id={workflow_id}] is not resumable: {why}", "Run it under another id.")


class WorkflowNotFoundError(WorkflowError, ValueError):
    """There is no workflow of this id."""

    CODE = ErrorCode.RUN_UNKNOWN

    @classmethod
    def of(cls, workflow_id: str, storage: str) -> WorkflowNotFoundError:
        return cls(
            f"Workflow[id={workflow_id}] was referenced but doesn't exist in {storage}",
            "See workflow.list_all(), or name another storage with workflow.init(storage=...).",
        )


class WorkflowStillActiveError(WorkflowError):
    """What was asked for needs a workflow that nobody runs."""

    CODE = ErrorCode.RUN_OWNED

    @classmethod
    def of(cls, operation: str, workflow_id: str) -> WorkflowStillActiveError:
        return cls(
            f"{operation} couldn't be completed because Workflow[id={workflow_id}] is still running or pending",
            f"Wait for it, or stop it with workflow.cancel({workflow_id!r}).",
        )


def _rebuild(kind: type[WorkflowError], what: str, remedy: str) -> WorkflowError:
    return kind(what, remedy)
