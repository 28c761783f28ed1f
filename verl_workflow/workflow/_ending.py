"""How a workflow is ended, and what it has stored removed: `cancel`, `delete`, `gc`."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from verl_workflow.errors import ErrorCode, VerlWorkflowError
from verl_workflow.workflow import _session
from verl_workflow.workflow._definition import delete_run
from verl_workflow.workflow._exceptions import WorkflowNotFoundError, WorkflowStillActiveError
from verl_workflow.workflow._fold import TERMINAL_STATES, RunStatus
from verl_workflow.workflow._ownership import is_gone
from verl_workflow.workflow._state import RunState, read_run, refuse_ended, request_cancel

if TYPE_CHECKING:
    from verl_workflow.workflow._gc import Collected

_POLL_S = 0.05


def cancel(workflow_id: str) -> None:
    """Stop a workflow: its running steps are ended, and it is CANCELED when this returns. What was committed stays.

    To cancel a cancelled workflow is no error. One that has ended otherwise keeps its end; a failed one that waits to
    be taken up leaves the queue.

    Raises:
        WorkflowNotFoundError: there is none; nothing was written.
        UserError(RUN_TERMINAL): it has succeeded or failed.
        TimeoutError: its driver has not stopped it within a minute.
    """
    with _session.found(workflow_id):
        _cancel(_session.existing(workflow_id))


def _cancel(state: RunState) -> None:
    workflow_id, store = state.run_id, _session.storage()
    deadline = time.monotonic() + 60.0
    if state.status is RunStatus.PENDING and state.host is not None:
        # Out of the queue first, or it would begin in between.
        left = not _session.withdraw(workflow_id)
        while left and state.epoch and read_run(store, workflow_id, progress=False).status is RunStatus.PENDING:
            # On its way to its driver, which is asked then.
            _wait(workflow_id, deadline)
        if not left and read_run(store, workflow_id, progress=False).status is RunStatus.FAILED:
            return
    request_cancel(store, workflow_id)
    while (status := read_run(store, workflow_id, progress=False).status) not in TERMINAL_STATES:
        if status is RunStatus.RESUMABLE:
            # Its driver has died before it met the request.
            request_cancel(store, workflow_id)
        _wait(workflow_id, deadline)
    # Its driver may have written the end before it met the request.
    refuse_ended(status, workflow_id)


def _wait(workflow_id: str, deadline: float) -> None:
    if time.monotonic() > deadline:
        raise TimeoutError(f"Workflow '{workflow_id}' was asked to stop, and has not within 60 s.")
    time.sleep(_POLL_S)


def delete(workflow_id: str) -> None:
    """Remove a workflow with all it has stored; its id is free again as soon as this has begun.

    One that was interrupted may be watched for 15 seconds, to see that its driver is gone.

    Raises:
        WorkflowStillActiveError: it is running or pending.
        WorkflowNotFoundError: there is none.
    """
    try:
        state = _session.existing(workflow_id)
    except WorkflowNotFoundError:
        raise
    except VerlWorkflowError as error:
        # What is damaged may be removed.
        if error.code is not ErrorCode.JOURNAL_DAMAGED:
            raise
        state = RunState(run_id=workflow_id, status=RunStatus.DAMAGED)
    active = state.status in {RunStatus.RUNNING, RunStatus.PENDING}
    if state.status is RunStatus.RESUMABLE and state.owner is not None:
        active = not is_gone(_session.storage(), state.key, state.owner, state.epoch)
    if active:
        raise WorkflowStillActiveError.of("DELETE", workflow_id)
    delete_run(_session.storage(), workflow_id, state.incarnation)


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
        return collect_all(_session.storage())
    with _session.found(workflow_id):
        return collect(_session.storage(), workflow_id)
