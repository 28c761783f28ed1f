"""Durable task graphs on Ray: a run is a journal in shared storage, driven by one fenced writer.

Exactly-once commit, at-least-once execution: a step whose result is in the journal is never executed again; one whose
worker or driver died before is. Nothing here knows what the steps do.
"""

from verl_workflow.workflow._actor import DriverHandle, driver_failure, start_driver
from verl_workflow.workflow._driver import Driver
from verl_workflow.workflow._identity import check_run_id, this_process
from verl_workflow.workflow._launch import InlineLauncher, Launcher, Outcome, RayLauncher
from verl_workflow.workflow._plan import Plan, RetryPolicy, Step, StepContext
from verl_workflow.workflow._state import (
    FINAL_STATES,
    TERMINAL_STATES,
    Attempt,
    RunState,
    RunStatus,
    StepState,
    StepStatus,
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
    "InlineLauncher",
    "Launcher",
    "Outcome",
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
    "driver_failure",
    "list_runs",
    "read_run",
    "request_cancel",
    "start_driver",
    "this_process",
]
