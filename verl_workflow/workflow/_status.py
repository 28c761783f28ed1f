"""Where a workflow stands, in the words of ray.workflow."""

from __future__ import annotations

import enum

from verl_workflow.workflow._fold import RunStatus


class WorkflowStatus(str, enum.Enum):
    """RUNNING: a driver shows signs of life. PENDING: it waits for its turn. RESUMABLE: it has not ended, and nobody
    runs it. FAILED: a step has failed; it can be resumed. SUCCESSFUL, CANCELED: it has ended for good. DAMAGED: its
    record cannot be read; `get_status` says why.
    """

    RUNNING = "RUNNING"
    PENDING = "PENDING"
    FAILED = "FAILED"
    RESUMABLE = "RESUMABLE"
    CANCELED = "CANCELED"
    SUCCESSFUL = "SUCCESSFUL"
    DAMAGED = "DAMAGED"

    @classmethod
    def of(cls, status: RunStatus) -> WorkflowStatus:
        return _WORDS[status]

    @classmethod
    def non_terminating_status(cls) -> tuple[WorkflowStatus, ...]:
        return cls.RUNNING, cls.PENDING


_WORDS = {
    RunStatus.RUNNING: WorkflowStatus.RUNNING,
    RunStatus.PENDING: WorkflowStatus.PENDING,
    RunStatus.FAILED: WorkflowStatus.FAILED,
    RunStatus.RESUMABLE: WorkflowStatus.RESUMABLE,
    RunStatus.CANCELLED: WorkflowStatus.CANCELED,
    RunStatus.SUCCEEDED: WorkflowStatus.SUCCESSFUL,
    RunStatus.DAMAGED: WorkflowStatus.DAMAGED,
}
