"""The one process that moves a run on: claim it, replay its journal, run what is left, write down what came of it."""

from __future__ import annotations

import hashlib
import json
import logging
import re
import time
from collections.abc import Mapping
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass
from typing import Any

from verl_workflow.errors import ErrorCode, UserError, VerlWorkflowError
from verl_workflow.storage import Store
from verl_workflow.workflow._attempt import Call, Outcome, Raised, Returned
from verl_workflow.workflow._earlier import EarlierResult, keep_result, read_earlier
from verl_workflow.workflow._fold import FINAL_STATES, Folded, RunStatus, fold
from verl_workflow.workflow._heartbeat import (
    INTERVAL_S,
    LEASE_S,
    Heartbeat,
    known_gone,
    read_heartbeat,
    seen_unchanged,
)
from verl_workflow.workflow._journal import Journal
from verl_workflow.workflow._launch import Launcher
from verl_workflow.workflow._owner import this_process
from verl_workflow.workflow._plan import Plan, Step
from verl_workflow.workflow._records import (
    Claimed,
    Event,
    RunCancelled,
    RunFailed,
    RunSucceeded,
    StepFailed,
    StepStarted,
    StepSucceeded,
)
from verl_workflow.workflow._state import RunState, load_value, read_definition, read_run

_CACHE_KEY = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,199}")
_log = logging.getLogger(__name__)


@dataclass(kw_only=True)
class _Running:
    step: Step
    attempt: int
    deadline: float | None
    cache_key: str | None
    timed_out: bool = False


class Driver:
    """Runs a plan to its end, or takes it up where another driver left it.

    Guarantees: each step is committed exactly once and never executed after its commit; it may be executed more than
    once before. A driver that has lost the run commits nothing any more.

    Args:
        plan: the same for each driver of a run.
        owner: who this is, by default the calling process; see `this_process`.
        force: take the run even from an owner that shows signs of life; that one is fenced and stops.
        lease_s: how long an owner's heartbeat must be seen unchanged before it is given up.
        heartbeat_s: between signs of life. poll_s: between looks for requests to cancel and for other drivers.
    """

    def __init__(
        self,
        store: Store,
        run_id: str,
        plan: Plan,
        launcher: Launcher,
        owner: Mapping[str, Any] | None = None,
        *,
        force: bool = False,
        lease_s: float = LEASE_S,
        heartbeat_s: float = INTERVAL_S,
        poll_s: float = 0.5,
    ) -> None:
        self._store = store
        self._run_id = run_id
        self._steps = {step.name: step for step in plan.in_order()}
        self._launcher = launcher
        self._owner = dict(owner) if owner is not None else this_process()
        self._force = force
        self._lease_s = lease_s
        self._heartbeat_s = heartbeat_s
        self._poll_s = poll_s
        self._journal = Journal(store, run_id)
        self._values: dict[str, Any] = {}
        self._committed: dict[str, StepSucceeded] = {}
        self._failures: dict[str, int] = {}
        self._last_attempt: dict[str, int] = {}
        self._missing: dict[str, set[str]] = {}
        self._followers: dict[str, list[str]] = {}
        # Steps whose inputs are there, with the monotonic time before which they must not start.
        self._ready: dict[str, float] = {}
        self._running: dict[Future[Outcome], _Running] = {}
        self._error: dict[str, Any] | None = None

    def run(self) -> RunState:
        """Drive the run until it has ended.

        Returns:
            SUCCEEDED, FAILED or CANCELLED. The error of a failed run is in the state; it is not raised.

        Raises:
            UserError: RUN_UNKNOWN; RUN_TERMINAL when the run has succeeded or was cancelled; RUN_OWNED when another
                driver shows signs of life (watching for them takes up to `lease_s`).
            FencedError: another driver has taken the run; the running steps were stopped.
            VerlWorkflowError: JOURNAL_DAMAGED; STORAGE when the storage fails. The run can be resumed.
        """
        read_definition(self._store, self._run_id)
        folded = self._claim()
        beat = Heartbeat(
            self._store, self._run_id, epoch=self._journal.epoch, owner=self._owner, interval_s=self._heartbeat_s
        )
        with beat:
            self._replay(folded)
            try:
                self._journal.append(self._drive(cancelled=folded.cancel_requested))
            finally:
                for future in self._running:
                    self._launcher.cancel(future)
        return read_run(self._store, self._run_id)

    def _claim(self) -> Folded:
        """Become the owner; what the journal says then is returned."""
        self._journal.read()
        while True:
            before = fold(self._journal.entries, self._run_id)
            self._refuse_ended(before)
            if before.owner is not None and before.status is RunStatus.RUNNING and not self._force:
                self._await_gone(before, before.owner)
            if self._journal.claim(Claimed(owner=self._owner, steps=list(self._steps))):
                return fold(self._journal.entries, self._run_id)
            self._journal.read()
            now = fold(self._journal.entries, self._run_id)
            self._refuse_ended(now)
            if now.epoch != before.epoch or not self._force:
                raise self._owned(now.owner or {})

    def _refuse_ended(self, state: Folded) -> None:
        if state.status in FINAL_STATES:
            raise UserError(
                ErrorCode.RUN_TERMINAL,
                f"the run has ended already: {state.status.value}",
                where=self._run_id,
                remedy="Start a new run.",
            )

    def _await_gone(self, state: Folded, owner: Mapping[str, Any]) -> None:
        if known_gone(read_heartbeat(self._store, self._run_id), owner, state.epoch):
            return
        if not seen_unchanged(self._store, self._run_id, self._lease_s):
            raise self._owned(owner)

    def _owned(self, owner: Mapping[str, Any]) -> UserError:
        return UserError(
            ErrorCode.RUN_OWNED,
            f"another driver runs it: process {owner.get('pid')} on {owner.get('host')}",
            where=self._run_id,
            remedy="Wait for it to end, or take the run from it with --force.",
        )

    def _replay(self, folded: Folded) -> None:
        now, clock = time.time(), time.monotonic()
        for name, step in self._steps.items():
            known = folded.step(name)
            self._failures[name] = known.failures
            self._last_attempt[name] = known.attempts[-1].number if known.attempts else 0
            self._followers[name] = []
            if known.committed is not None:
                self._committed[name] = known.committed
                continue
            self._missing[name] = {before for before in step.after if before not in self._committed}
            for before in self._missing[name]:
                self._followers[before].append(name)
            if not self._missing[name]:
                # Never longer than the pause itself: the clock that wrote it may be ahead.
                pause = min((known.retry_at or now) - now, step.retry.pause_s(max(known.failures, 1)))
                self._ready[name] = clock + max(pause, 0.0)

    def _drive(self, *, cancelled: bool) -> Event:
        """Start, await and settle attempts; returns how the run ends."""
        next_poll = 0.0
        cancelling = False
        while True:
            if time.monotonic() >= next_poll:
                self._journal.poll()
                next_poll = time.monotonic() + self._poll_s
            if (cancelled or self._journal.cancel_requested) and not cancelling:
                cancelling = True
                for future in list(self._running):
                    self._launcher.cancel(future)
            if not cancelling and self._error is None:
                self._start_due()
            if len(self._committed) == len(self._steps):
                return RunSucceeded()
            if not self._running:
                if cancelling:
                    return RunCancelled()
                if self._error is not None:
                    return RunFailed(error=self._error)
            self._await(next_poll)
            for future in [future for future in self._running if future.done()]:
                self._settle(self._running.pop(future), future.result(), cancelling)
            self._stop_late()

    def _await(self, next_poll: float) -> None:
        times = [next_poll, *(running.deadline for running in self._running.values() if running.deadline is not None)]
        if self._error is None:
            times.extend(self._ready.values())
        pause = max(min(times) - time.monotonic(), 0.0)
        if self._running:
            wait(self._running, timeout=pause, return_when=FIRST_COMPLETED)
        else:
            time.sleep(pause)

    def _start_due(self) -> None:
        # A step that is taken from an earlier run makes others ready at once.
        while self._error is None and (due := [name for name, at in self._ready.items() if at <= time.monotonic()]):
            for name in due:
                del self._ready[name]
                self._begin(self._steps[name])
                if self._error is not None:
                    return

    def _begin(self, step: Step) -> None:
        inputs = {name: self._value(name) for name in step.after}
        try:
            cache_key = _cache_key(step, inputs)
        except Exception as error:  # noqa: BLE001 - it ends the step, with its cause in the journal
            self._fail(step, self._number(step), Raised.of(error), will_retry=False)
            return
        if cache_key is not None and self._take_earlier(step, cache_key):
            return
        attempt = self._number(step)
        call = Call(
            call=step.call,
            store_uri=self._store.uri,
            run_id=self._run_id,
            step=step.name,
            attempt=attempt,
            epoch=self._journal.epoch,
            inputs=inputs,
        )
        future = self._launcher.start(step, call)
        deadline = time.monotonic() + step.timeout_s if step.timeout_s is not None else None
        self._running[future] = _Running(step=step, attempt=attempt, deadline=deadline, cache_key=cache_key)

    def _number(self, step: Step) -> int:
        """Open a new attempt in the journal."""
        attempt = self._last_attempt[step.name] + 1
        self._journal.append(StepStarted(step=step.name, attempt=attempt))
        self._last_attempt[step.name] = attempt
        return attempt

    def _take_earlier(self, step: Step, cache_key: str) -> bool:
        try:
            earlier = read_earlier(self._store, cache_key)
            if earlier is None:
                return False
            if step.verify is not None:
                step.verify(earlier.value)
        except Exception as error:  # noqa: BLE001 - whatever is wrong with it, the step can still run
            _log.info("step %s runs: the earlier result %s cannot be used: %s", step.name, cache_key, error)
            return False
        data = json.dumps(earlier.value, allow_nan=False).encode()
        self._commit(step, 0, data, reused_from=earlier.run_id)
        return True

    def _settle(self, ended: _Running, outcome: Outcome, cancelling: bool) -> None:
        step = ended.step
        if isinstance(outcome, Returned):
            if ended.cache_key is not None:
                # Before the commit: should this driver die in between, the next one finds the result here.
                keep_result(
                    self._store, ended.cache_key, EarlierResult(run_id=self._run_id, value=json.loads(outcome.data))
                )
            self._commit(step, ended.attempt, outcome.data)
            return
        if cancelling:
            # Ended by us; the run's own record says so.
            return
        if ended.timed_out:
            outcome = Raised.of(_timeout(step))
        failures = self._failures[step.name] + 1
        again = outcome.retryable and failures < step.retry.attempts and self._error is None
        self._fail(step, ended.attempt, outcome, will_retry=again)

    def _commit(self, step: Step, attempt: int, data: bytes, *, reused_from: str | None = None) -> None:
        key = f"runs/{self._run_id}/values/{step.name}-{self._journal.epoch}-{attempt}.json"
        self._store.put(key, data)
        event = StepSucceeded(
            step=step.name,
            attempt=attempt,
            value_key=key,
            sha256=hashlib.sha256(data).hexdigest(),
            reused_from=reused_from,
        )
        self._journal.append(event)
        self._committed[step.name] = event
        self._values[step.name] = json.loads(data)
        del self._missing[step.name]
        for name in self._followers[step.name]:
            self._missing[name].discard(step.name)
            if not self._missing[name]:
                self._ready[name] = 0.0

    def _fail(self, step: Step, attempt: int, outcome: Raised, *, will_retry: bool) -> None:
        self._failures[step.name] += 1
        pause = step.retry.pause_s(self._failures[step.name]) if will_retry else 0.0
        error = outcome.to_json(step.name)
        self._journal.append(
            StepFailed(step=step.name, attempt=attempt, error=error, will_retry=will_retry, retry_in_s=pause)
        )
        _log.warning("attempt %d of step %s failed: %s", attempt, step.name, error["message"])
        if will_retry:
            self._ready[step.name] = time.monotonic() + pause
        elif self._error is None:
            self._error = error

    def _stop_late(self) -> None:
        for future, running in self._running.items():
            if running.deadline is not None and time.monotonic() >= running.deadline:
                running.timed_out, running.deadline = True, None
                self._launcher.cancel(future)

    def _value(self, name: str) -> Any:
        if name not in self._values:
            self._values[name] = load_value(self._store, self._committed[name])
        return self._values[name]


def _cache_key(step: Step, inputs: Mapping[str, Any]) -> str | None:
    if step.key is None:
        return None
    key = step.key(inputs)
    if _CACHE_KEY.fullmatch(key) is None or ".." in key:
        raise UserError(
            ErrorCode.SPEC_INVALID,
            "this cannot name an earlier result",
            where=f"{step.name}.key",
            value=key,
            remedy="Return letters, digits, '.', '-' and '_', 200 at most; a hexadecimal digest will do.",
        )
    return key


def _timeout(step: Step) -> VerlWorkflowError:
    return VerlWorkflowError(
        ErrorCode.STEP_TIMEOUT,
        f"the attempt took longer than {step.timeout_s:g} s and was stopped",
        where=step.name,
        remedy="Raise the step's timeout, or find out what it waits for.",
        retryable=True,
    )
