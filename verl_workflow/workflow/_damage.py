"""The error for what is not as it was written."""

from __future__ import annotations

from verl_workflow.errors import ErrorCode, VerlWorkflowError


def damaged(key: str, why: str) -> VerlWorkflowError:
    """The error for journal or value files that are not as they were written."""
    return VerlWorkflowError(
        ErrorCode.JOURNAL_DAMAGED,
        f"the run's record is damaged: {why}",
        where=key,
        remedy="Restore this file from a backup of the storage, or start a new run; other runs are not affected.",
    )
