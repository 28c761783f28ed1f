"""Durable task graphs on Ray: a run is a journal in shared storage, driven by one fenced writer.

Exactly-once commit, at-least-once execution: a step whose result is in the journal is never executed again; one whose
worker or driver died before is. Nothing here knows what the steps do, and reading runs needs no Ray.
"""

from verl_workflow.workflow._actor import DriverHandle, driver_failure, start_driver, still_drives
from verl_workflow.workflow._api import (
    continuation,
    fork,
    fork_async,
    get_metadata,
    get_output,
    get_output_async,
    get_status,
    init,
    list_all,
    resume,
    resume_all,
    resume_async,
    run,
    run_async,
    send_event,
    serve_events,
)
from verl_workflow.workflow._damage import damaged
from verl_workflow.workflow._definition import check_run_id, create_run
from verl_workflow.workflow._driver import Driver
from verl_workflow.workflow._earlier import EarlierResult, read_earlier
from verl_workflow.workflow._ending import cancel, delete, gc
from verl_workflow.workflow._events import EventListener, TimerListener, sleep, wait_for_event
from verl_workflow.workflow._exceptions import (
    WorkflowCancellationError,
    WorkflowError,
    WorkflowExecutionError,
    WorkflowNotFoundError,
    WorkflowNotResumableError,
    WorkflowStillActiveError,
)
from verl_workflow.workflow._fold import FINAL_STATES, TERMINAL_STATES, Attempt, RunStatus, StepStatus
from verl_workflow.workflow._fork import check_fork
from verl_workflow.workflow._gc import Collected
from verl_workflow.workflow._launch import InlineLauncher, Launcher, RayLauncher
from verl_workflow.workflow._metadata import module_path
from verl_workflow.workflow._node import current
from verl_workflow.workflow._options import options
from verl_workflow.workflow._owner import this_process
from verl_workflow.workflow._ownership import refuse_driven
from verl_workflow.workflow._plan import Plan, RetryPolicy, Step, StepContext
from verl_workflow.workflow._sent_events import HTTPListener, StorageListener
from verl_workflow.workflow._state import (
    RunState,
    StepState,
    list_runs,
    read_run,
    request_cancel,
)
from verl_workflow.workflow._status import WorkflowStatus

RUNNING = WorkflowStatus.RUNNING
PENDING = WorkflowStatus.PENDING
FAILED = WorkflowStatus.FAILED
RESUMABLE = WorkflowStatus.RESUMABLE
CANCELED = WorkflowStatus.CANCELED
SUCCESSFUL = WorkflowStatus.SUCCESSFUL
DAMAGED = WorkflowStatus.DAMAGED

__all__ = [
    "CANCELED",
    "DAMAGED",
    "FAILED",
    "FINAL_STATES",
    "PENDING",
    "RESUMABLE",
    "RUNNING",
    "SUCCESSFUL",
    "TERMINAL_STATES",
    "Attempt",
    "Collected",
    "Driver",
    "DriverHandle",
    "EarlierResult",
    "EventListener",
    "HTTPListener",
    "InlineLauncher",
    "Launcher",
    "Plan",
    "RayLauncher",
    "RetryPolicy",
    "RunState",
    "RunStatus",
    "Step",
    "StepContext",
    "StepState",
    "StepStatus",
    "StorageListener",
    "TimerListener",
    "WorkflowCancellationError",
    "WorkflowError",
    "WorkflowExecutionError",
    "WorkflowNotFoundError",
    "WorkflowNotResumableError",
    "WorkflowStatus",
    "WorkflowStillActiveError",
    "cancel",
    "check_fork",
    "check_run_id",
    "continuation",
    "create_run",
    "current",
    "damaged",
    "delete",
    "driver_failure",
    "fork",
    "fork_async",
    "gc",
    "get_metadata",
    "get_output",
    "get_output_async",
    "get_status",
    "init",
    "list_all",
    "list_runs",
    "module_path",
    "options",
    "read_earlier",
    "read_run",
    "refuse_driven",
    "request_cancel",
    "resume",
    "resume_all",
    "resume_async",
    "run",
    "run_async",
    "send_event",
    "serve_events",
    "sleep",
    "start_driver",
    "still_drives",
    "this_process",
    "wait_for_event",
]
