"""Which storage a task means."""

from __future__ import annotations

from verl_airflow.hook import RayJobsHook
from verl_workflow.errors import ErrorCode, UserError


def storage_uri(storage: str | None, hook: RayJobsHook, task_id: str) -> str:
    """The one that the task names, or its connection: with a scheme.

    Raises:
        UserError(USAGE_INVALID): none is named.
    """
    from verl_workflow.storage import absolute_uri

    uri = storage or hook.address.storage
    if not uri:
        raise UserError(
            ErrorCode.USAGE_INVALID,
            "no storage is named",
            where=f"task {task_id}",
            remedy=f"Put its URI into the connection {hook.conn_id}, or into the task's `storage`.",
        )
    return absolute_uri(uri)
