"""From a journal to the state it describes; the rules no sound journal breaks are checked on the way."""

from __future__ import annotations

import copy
import enum
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from verl_workflow.workflow._damage import damaged
from verl_workflow.workflow._records import (
    CancelRequested,
    Claimed,
    Entry,
    Event,
    RunCancelled,
    RunFailed,
    RunSucceeded,
    StepContinued,
    StepFailed,
    StepsReset,
    StepStarted,
    StepSucceeded,
)


class RunStatus(str, enum.Enum):
    """Where a run stands.

    PENDING: a driver is to take it. RUNNING: a driver shows signs of life. RESUMABLE: not ended, and nobody runs it.
    SUCCEEDED, CANCELLED: ended for good. FAILED: ended; resuming it gives its failed steps a fresh
    retry budget. DAMAGED: only from `list_runs`, its record cannot be read.
    """

    PENDING = "pending"
    RUNNING = "running"
    RESUMABLE = "resumable"
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    CANCELLED = "cancelled"
    DAMAGED = "damaged"


class StepStatus(str, enum.Enum):
    """Where a step stands. WAITING: for its inputs, for the pause before a retry, or for a driver. CONTINUED: it has
    returned other steps, and the value of the last of them becomes its own.
    """

    WAITING = "waiting"
    RUNNING = "running"
    CONTINUED = "continued"
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    CANCELLED = "cancelled"


TERMINAL_STATES = frozenset({RunStatus.SUCCEEDED, RunStatus.FAILED, RunStatus.CANCELLED})
"""The run goes on no more by itself. FAILED can be resumed."""

FINAL_STATES = frozenset({RunStatus.SUCCEEDED, RunStatus.CANCELLED})
"""The run cannot be resumed either."""


@dataclass(frozen=True, kw_only=True)
class Attempt:
    """One execution of a step.

    Attributes:
        number: 1, 2, ... over the whole run; never given twice.
        started_at, ended_at: seconds since 1970; ended_at is None while it runs.
        status: RUNNING, SUCCEEDED, FAILED or CANCELLED.
        error: why it failed; None otherwise, and None when it is FAILED because its driver was lost.
    """

    number: int
    epoch: int
    started_at: float
    ended_at: float | None = None
    status: StepStatus = StepStatus.RUNNING
    error: dict[str, Any] | None = None


@dataclass(kw_only=True)
class FoldedStep:
    """A step as far as the journal goes.

    Attributes:
        failures, crashes: count against the budgets; lost drivers do not.
        code: digest of what it is executed with since it was taken up; None: its graph says which code it has.
        used: the number of the last attempt at a step of this name that is no part of the run any more.
    """

    status: StepStatus = StepStatus.WAITING
    attempts: list[Attempt] = field(default_factory=list)
    failures: int = 0
    crashes: int = 0
    retry_at: float | None = None
    committed: StepSucceeded | None = None
    continued: StepContinued | None = None
    code: str | None = None
    used: int = 0

    @property
    def last_number(self) -> int:
        """Of its attempts, the next of which has a higher one."""
        return self.attempts[-1].number if self.attempts else self.used

    @property
    def settled(self) -> bool:
        """Whether it must not be executed any more. A value that was not kept does not settle it."""
        return self.continued is not None or (self.committed is not None and self.committed.value_kept)


@dataclass(kw_only=True)
class Folded:
    """A run as far as the journal goes; `status` is one of PENDING, RUNNING and the terminal ones."""

    status: RunStatus = RunStatus.PENDING
    epoch: int = 0
    owner: dict[str, Any] | None = None
    claimed_at: float | None = None
    updated_at: float | None = None
    ended_at: float | None = None
    error: dict[str, Any] | None = None
    cancel_requested: bool = False
    steps: dict[str, FoldedStep] = field(default_factory=dict)
    used: dict[str, int] = field(default_factory=dict)

    def step(self, name: str) -> FoldedStep:
        found = self.steps.get(name)
        if found is None:
            found = self.steps[name] = FoldedStep(used=self.used.get(name, 0))
        return found

    def continued_steps(self, name: str) -> Sequence[str]:
        """The steps that this one has returned."""
        step = self.steps.get(name)
        return () if step is None or step.continued is None else step.continued.steps

    def code_of(self, name: str, recorded: str) -> str:
        """Digest of the code that a step has been executed with last; `recorded`: what its graph says."""
        step = self.steps.get(name)
        return recorded if step is None or step.code is None else step.code

    def value_of(self, name: str) -> StepSucceeded | None:
        """The commit that a step's value comes from: its own, or that of the last step it continued to."""
        while (step := self.steps.get(name)) is not None:
            if step.committed is not None or step.continued is None:
                return step.committed
            name = step.continued.steps[-1]
        return None

    def first_failure(self, names: Iterable[str]) -> dict[str, Any] | None:
        """The error of that of these steps which failed for good first: others may have been stopped because of it."""
        failed = [self.steps[name].attempts[-1] for name in names if self.step(name).status is StepStatus.FAILED]
        return min(failed, key=lambda attempt: attempt.ended_at or 0.0).error if failed else None

    @property
    def untouched(self) -> bool:
        """Whether no step was begun or taken over yet."""
        return not any(step.attempts or step.settled for step in self.steps.values())

    def seeded(self, events: Iterable[Event]) -> Folded:
        """As it will be with what a fork takes over, which its first driver records with its claim."""
        if not self.untouched:
            return self
        found = copy.deepcopy(self)
        for event in events:
            _apply(found, Entry(run="", seq=0, epoch=0, time=0.0, events=()), event)
        return found

    def add(self, entry: Entry, key: str) -> None:
        """Take in the next entry.

        Raises:
            VerlWorkflowError(JOURNAL_DAMAGED): names `key`; correct drivers could not have written it.
        """
        for event in entry.events:
            broken = _broken_rule(self, entry, event)
            if broken:
                raise damaged(key, broken)
            _apply(self, entry, event)
        self.updated_at = entry.time


def fold(entries: Iterable[Entry], run_id: str) -> Folded:
    """Replay entries in order. Raises as `Folded.add`."""
    state = Folded()
    for entry in entries:
        state.add(entry, f"runs/{run_id}/journal/{entry.seq:012}.json")
    return state


def _broken_rule(state: Folded, entry: Entry, event: Event) -> str | None:
    ended = state.status in TERMINAL_STATES
    if isinstance(event, CancelRequested):
        return None
    if isinstance(event, Claimed):
        if entry.epoch != state.epoch + 1:
            return f"epoch {entry.epoch} was claimed after epoch {state.epoch}"
        return "the run was claimed after its end" if state.status in FINAL_STATES else None
    if entry.epoch != state.epoch or state.epoch == 0:
        return f"it was written under epoch {entry.epoch} after epoch {state.epoch} was claimed"
    if ended:
        return f"the run had {state.status.value} before"
    if isinstance(event, StepStarted | StepFailed | StepSucceeded | StepContinued):
        step = state.step(event.step)
        if step.committed is not None and (step.committed.value_kept or not isinstance(event, StepStarted)):
            return f"step {event.step} was committed before"
        # The error of a step that it continued to may become its value.
        if step.continued is not None and not (isinstance(event, StepSucceeded) and event.attempt == 0):
            return f"step {event.step} was continued before"
        last = step.attempts[-1] if step.attempts else None
        if isinstance(event, StepStarted):
            running = last is not None and last.status is StepStatus.RUNNING
            if running or event.attempt <= step.last_number:
                return f"attempt {event.attempt} of step {event.step} was started after attempt {step.last_number}"
        elif event.attempt > 0 and (
            last is None or last.number != event.attempt or last.status is not StepStatus.RUNNING
        ):
            return f"attempt {event.attempt} of step {event.step} was not running"
    return None


def _apply(state: Folded, entry: Entry, event: Event) -> None:
    if isinstance(event, Claimed):
        _apply_claim(state, entry, event)
    elif isinstance(event, StepStarted):
        step = state.step(event.step)
        step.status, step.retry_at, step.committed = StepStatus.RUNNING, None, None
        step.attempts.append(Attempt(number=event.attempt, epoch=entry.epoch, started_at=entry.time))
    elif isinstance(event, StepSucceeded):
        step = state.step(event.step)
        step.status, step.committed, step.retry_at = StepStatus.SUCCEEDED, event, None
        if not event.value_kept:
            # It may have to be executed again, and gets a budget of its own for that.
            step.failures, step.crashes = 0, 0
        _end_attempt(step, entry.time, StepStatus.SUCCEEDED)
    elif isinstance(event, StepContinued):
        step = state.step(event.step)
        step.status, step.continued, step.retry_at = StepStatus.CONTINUED, event, None
        _end_attempt(step, entry.time, StepStatus.SUCCEEDED)
        for name in event.steps:
            state.step(name)
    elif isinstance(event, StepsReset):
        _apply_reset(state, event)
    elif isinstance(event, StepFailed):
        step = state.step(event.step)
        _end_attempt(step, entry.time, StepStatus.FAILED, event.error)
        if event.crash:
            step.crashes += 1
        else:
            step.failures += 1
        step.status = StepStatus.WAITING if event.will_retry else StepStatus.FAILED
        step.retry_at = entry.time + event.retry_in_s if event.will_retry else None
    elif isinstance(event, RunSucceeded):
        state.status, state.ended_at = RunStatus.SUCCEEDED, entry.time
    elif isinstance(event, RunFailed):
        state.status, state.ended_at, state.error = RunStatus.FAILED, entry.time, event.error
    elif isinstance(event, CancelRequested):
        state.cancel_requested = True
    elif isinstance(event, RunCancelled):
        state.status, state.ended_at = RunStatus.CANCELLED, entry.time
        for step in state.steps.values():
            if step.committed is None and step.continued is None:
                step.status, step.retry_at = StepStatus.CANCELLED, None
                _end_attempt(step, entry.time, StepStatus.CANCELLED)


def _apply_claim(state: Folded, entry: Entry, event: Claimed) -> None:
    resumed = state.status is RunStatus.FAILED
    state.status, state.epoch, state.owner = RunStatus.RUNNING, entry.epoch, event.owner
    state.claimed_at, state.ended_at, state.error = entry.time, None, None
    # A request that came when the run had failed was refused.
    state.cancel_requested = state.cancel_requested and not resumed
    if event.steps and list(state.steps) != event.steps:
        state.steps = {**{name: state.step(name) for name in event.steps}, **state.steps}
    for step in state.steps.values():
        if step.committed is not None or step.continued is not None:
            continue
        if resumed:
            step.failures, step.crashes, step.retry_at = 0, 0, None
        _end_attempt(step, entry.time, StepStatus.FAILED)
        # One that failed for good before its driver was lost has no attempts left.
        if resumed or step.status is not StepStatus.FAILED:
            step.status = StepStatus.WAITING


def _apply_reset(state: Folded, event: StepsReset) -> None:
    """What a step has continued to was of its former code: it returns its steps anew, under whatever names."""
    left = [inner for name in event.steps for inner in state.continued_steps(name)]
    while left:
        name = left.pop()
        left.extend(state.continued_steps(name))
        gone = state.steps.pop(name, None)
        if gone is not None:
            state.used[name] = gone.last_number
    for name in event.steps:
        step = state.steps.get(name)
        if step is not None:
            step.status, step.committed, step.continued = StepStatus.WAITING, None, None
            step.failures, step.crashes, step.retry_at = 0, 0, None
    for name, code in event.code.items():
        step = state.steps.get(name)
        if step is not None:
            step.code = code
            if step.status is StepStatus.FAILED:
                step.status, step.failures, step.crashes, step.retry_at = StepStatus.WAITING, 0, 0, None


def _end_attempt(step: FoldedStep, at: float, status: StepStatus, error: dict[str, Any] | None = None) -> None:
    last = step.attempts[-1] if step.attempts else None
    if last is not None and last.status is StepStatus.RUNNING:
        step.attempts[-1] = Attempt(
            number=last.number, epoch=last.epoch, started_at=last.started_at, ended_at=at, status=status, error=error
        )
