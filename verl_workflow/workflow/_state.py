"""What a run has come to: the fold over its journal, readable by anyone with access to the storage."""

from __future__ import annotations

import difflib
import enum
import hashlib
import json
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from verl_workflow.errors import ErrorCode, UserError, VerlWorkflowError
from verl_workflow.storage import Store
from verl_workflow.workflow import _records as records
from verl_workflow.workflow._identity import check_run_id, is_dead
from verl_workflow.workflow._journal import Journal

# A heartbeat is written every 2 s; a pause of this many seconds makes the run resumable.
STALE_S = 15.0


class RunStatus(str, enum.Enum):
    """PENDING: defined, never claimed. RESUMABLE: not finished, and nobody runs it. FAILED runs can be resumed."""

    PENDING = "pending"
    RUNNING = "running"
    RESUMABLE = "resumable"
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    CANCELLED = "cancelled"
    DAMAGED = "damaged"


class StepStatus(str, enum.Enum):
    WAITING = "waiting"
    RUNNING = "running"
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    CANCELLED = "cancelled"


# Nobody works on such a run, and nobody will unless it is resumed.
TERMINAL_STATES = frozenset({RunStatus.SUCCEEDED, RunStatus.FAILED, RunStatus.CANCELLED})
# These cannot be resumed either.
FINAL_STATES = frozenset({RunStatus.SUCCEEDED, RunStatus.CANCELLED})


@dataclass(frozen=True, kw_only=True)
class Attempt:
    """One execution of a step. Times are Unix seconds; `ended_at` is None while it runs or when its driver died."""

    number: int
    epoch: int
    started_at: float
    ended_at: float | None = None
    status: StepStatus = StepStatus.RUNNING
    error: Mapping[str, Any] | None = None


@dataclass(frozen=True, kw_only=True)
class StepState:
    """Attributes: value, what the step returned, once it has succeeded; progress, the facts it reported last;
    reused_from, the run whose result was taken instead of an execution."""

    name: str
    status: StepStatus = StepStatus.WAITING
    attempts: tuple[Attempt, ...] = ()
    value: Any = None
    progress: Mapping[str, Any] | None = None
    reused_from: str | None = None


@dataclass(frozen=True, kw_only=True)
class RunState:
    """Attributes: epoch, of the newest driver; owner, that driver; times are Unix seconds; heartbeat_age_s, seconds since
    its last sign of life by this host's clock; error, what ended a failed run; definition, as it was stored."""

    run_id: str
    status: RunStatus
    epoch: int = 0
    owner: Mapping[str, Any] | None = None
    created_at: float | None = None
    updated_at: float | None = None
    ended_at: float | None = None
    steps: Mapping[str, StepState] = field(default_factory=dict)
    error: Mapping[str, Any] | None = None
    cancel_requested: bool = False
    heartbeat_age_s: float | None = None
    definition: Mapping[str, Any] = field(default_factory=dict)


def fold(run_id: str, log: Iterable[records.Record]) -> RunState:
    """The state after `log`: values and liveness left out. Pure."""
    state = RunState(run_id=run_id, status=RunStatus.PENDING)
    steps: dict[str, StepState] = {}
    for record in log:
        state = replace(state, created_at=state.created_at or record.time, updated_at=record.time)
        if isinstance(record, records.Claimed):
            steps = {name: _interrupted(step) for name, step in steps.items()}
            state = replace(
                state,
                status=RunStatus.RUNNING,
                epoch=record.epoch,
                owner=record.owner,
                ended_at=None,
                error=None,
            )
        elif isinstance(record, records.StepStarted):
            step = steps.get(record.step, StepState(name=record.step))
            attempt = Attempt(number=record.attempt, epoch=record.epoch, started_at=record.time)
            steps[record.step] = replace(step, status=StepStatus.RUNNING, attempts=(*step.attempts, attempt))
        elif isinstance(record, records.StepSucceeded):
            step = steps.get(record.step, StepState(name=record.step))
            steps[record.step] = replace(
                _ended(step, record, StepStatus.SUCCEEDED, None), reused_from=record.reused_from
            )
        elif isinstance(record, records.StepFailed):
            step = _ended(steps[record.step], record, StepStatus.FAILED, record.error)
            steps[record.step] = replace(step, status=StepStatus.WAITING) if record.will_retry else step
        elif isinstance(record, records.CancelRequested):
            state = replace(state, cancel_requested=True)
        elif isinstance(record, records.RunSucceeded):
            state = replace(state, status=RunStatus.SUCCEEDED, ended_at=record.time)
        elif isinstance(record, records.RunFailed):
            state = replace(state, status=RunStatus.FAILED, ended_at=record.time, error=record.error)
        elif isinstance(record, records.RunCancelled):
            steps = {
                name: replace(step, status=StepStatus.CANCELLED) if step.status is not StepStatus.SUCCEEDED else step
                for name, step in steps.items()
            }
            state = replace(state, status=RunStatus.CANCELLED, ended_at=record.time)
    return replace(state, steps=steps)


def read_run(store: Store, run_id: str) -> RunState:
    """The run as it is now: values loaded and checked against their digests, progress and liveness added.

    Raises:
        UserError(RUN_UNKNOWN): there is no such run; RUN_ID_INVALID: there cannot be.
        VerlWorkflowError(JOURNAL_DAMAGED): a record or a value is not what was written.
    """
    check_run_id(run_id)
    definition = store.get(f"runs/{run_id}/definition.json")
    if definition is None:
        raise _unknown(store, run_id)
    journal = Journal(store, run_id)
    journal.read()
    state = fold(run_id, journal.records)
    values = {
        record.step: load_value(store, run_id, record)
        for record in journal.records
        if isinstance(record, records.StepSucceeded)
    }
    steps = {
        name: replace(step, value=values.get(name), progress=_json(store.get(f"runs/{run_id}/progress/{name}.json")))
        for name, step in state.steps.items()
    }
    heartbeat = _json(store.get(f"runs/{run_id}/heartbeat.json"))
    age = max(0.0, time.time() - heartbeat["time"]) if heartbeat else None
    if state.status is RunStatus.RUNNING and _is_abandoned(state, heartbeat, age):
        state = replace(state, status=RunStatus.RESUMABLE)
    return replace(state, steps=steps, heartbeat_age_s=age, definition=json.loads(definition))


def list_runs(store: Store) -> list[RunState]:
    """All runs, oldest first. One that is damaged is listed as such, with its error, and hides no other."""
    found = []
    for run_id in store.folders("runs"):
        try:
            found.append(read_run(store, run_id))
        except UserError:
            # A folder without a definition: a run that was never recorded.
            continue
        except VerlWorkflowError as error:
            found.append(RunState(run_id=run_id, status=RunStatus.DAMAGED, error=error.to_json()))
    return sorted(found, key=lambda state: (state.created_at or 0.0, state.run_id))


def create_run(store: Store, run_id: str, definition: Mapping[str, Any]) -> None:
    """Record what the run is. Raises UserError(RUN_EXISTS) when the id is taken, RUN_ID_INVALID when it cannot be one."""
    check_run_id(run_id)
    if not store.create(f"runs/{run_id}/definition.json", json.dumps(definition, indent=1).encode()):
        raise UserError(
            ErrorCode.RUN_EXISTS,
            "a run of this id exists already",
            where=store.uri,
            value=run_id,
            remedy="Resume it, or choose another id.",
        )


def request_cancel(store: Store, run_id: str) -> RunState:
    """Ask the run's driver to stop; a run that nobody drives is cancelled here and now. Returns the state after it.

    Raises:
        UserError(RUN_UNKNOWN); RUN_TERMINAL when it has succeeded or failed already. Cancelling twice is no error.
    """
    state = read_run(store, run_id)
    if state.status is RunStatus.CANCELLED:
        return state
    if state.status in TERMINAL_STATES:
        raise UserError(
            ErrorCode.RUN_TERMINAL,
            f"the run has {state.status.value} already",
            where=run_id,
            remedy="There is nothing left to cancel.",
        )
    journal = Journal(store, run_id)
    journal.append(records.CancelRequested, epoch=0)
    if state.status in {RunStatus.PENDING, RunStatus.RESUMABLE}:
        epoch = journal.epoch + 1
        journal.append(records.Claimed, epoch=epoch, owner={"host": "", "boot": "", "pid": 0, "started": None})
        journal.append(records.RunCancelled, epoch=epoch)
    return read_run(store, run_id)


def load_value(store: Store, run_id: str, record: records.StepSucceeded) -> Any:
    """A step's value. Raises VerlWorkflowError(JOURNAL_DAMAGED) when it is gone or differs from what was committed."""
    data = store.get(record.value_key)
    if data is None or hashlib.sha256(data).hexdigest() != record.sha256:
        raise VerlWorkflowError(
            ErrorCode.JOURNAL_DAMAGED,
            f"the value of step {record.step!r} {'is gone' if data is None else 'differs from what was committed'}",
            where=f"{run_id}: {record.value_key}",
            remedy="Restore this file from a backup of the storage; other runs are not affected.",
        )
    return json.loads(data)


def _ended(
    step: StepState,
    record: records.StepSucceeded | records.StepFailed,
    status: StepStatus,
    error: Mapping[str, Any] | None,
) -> StepState:
    attempts = tuple(
        replace(attempt, ended_at=record.time, status=status, error=error)
        if attempt.number == record.attempt
        else attempt
        for attempt in step.attempts
    )
    return replace(step, status=status, attempts=attempts)


def _interrupted(step: StepState) -> StepState:
    """What a new driver finds of a step that has not succeeded: it is to be done."""
    if step.status is StepStatus.SUCCEEDED:
        return step
    attempts = tuple(
        replace(attempt, status=StepStatus.FAILED) if attempt.status is StepStatus.RUNNING else attempt
        for attempt in step.attempts
    )
    return replace(step, status=StepStatus.WAITING, attempts=attempts)


def _is_abandoned(state: RunState, heartbeat: Mapping[str, Any] | None, age: float | None) -> bool:
    assert state.owner is not None
    if is_dead(state.owner):
        return True
    if heartbeat is None or heartbeat.get("epoch") != state.epoch:
        # A driver that has only just claimed the run beats within moments.
        return time.time() - (state.updated_at or 0.0) > STALE_S
    return age is not None and age > STALE_S


def _json(data: bytes | None) -> Any:
    if data is None:
        return None
    try:
        return json.loads(data)
    except ValueError:
        # Progress and heartbeats are best effort; the next one replaces it.
        return None


def _unknown(store: Store, run_id: str) -> UserError:
    near = difflib.get_close_matches(run_id, store.folders("runs"), n=1)
    return UserError(
        ErrorCode.RUN_UNKNOWN,
        "there is no such run",
        where=store.uri,
        value=run_id,
        remedy=f"Did you mean {near[0]!r}?" if near else "See `verl-workflow list` for those there are.",
    )
