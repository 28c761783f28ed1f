"""Durable task graphs on Ray: a run is a journal in shared storage, driven by one fenced writer.

Exactly-once commit, at-least-once execution: a step whose result is in the journal is never executed again; one whose
worker or driver died before is. Nothing here knows what the steps do, and reading runs needs no Ray.
"""

from verl_workflow.workflow._actor import DriverHandle, driver_failure, start_driver, still_drives
from verl_workflow.workflow._driver import Driver
from verl_workflow.workflow._earlier import EarlierResult, read_earlier
from verl_workflow.workflow._fold import FINAL_STATES, TERMINAL_STATES, Attempt, RunStatus, StepStatus
from verl_workflow.workflow._launch import InlineLauncher, Launcher, RayLauncher
from verl_workflow.workflow._owner import this_process
from verl_workflow.workflow._plan import Plan, RetryPolicy, Step, StepContext
from verl_workflow.workflow._records import damaged
from verl_workflow.workflow._state import (
    RunState,
    StepState,
    check_run_id,
    create_run,
    list_runs,
    read_run,
    request_cancel,
)

__all__ = [
    "FINAL_STATES",
    "TERMINAL_STATES",
    "Attempt",
    "Driver",
    "DriverHandle",
    "EarlierResult",
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
    "check_run_id",
    "create_run",
    "damaged",
    "driver_failure",
    "list_runs",
    "read_earlier",
    "read_run",
    "request_cancel",
    "start_driver",
    "still_drives",
    "this_process",
]
