"""The one process that moves a run on: claim it, replay its journal, run what is left, write down what came of it."""

from __future__ import annotations

import dataclasses
import logging
import time
from collections.abc import Iterable, Mapping
from typing import Any

from verl_workflow.errors import ErrorCode, VerlWorkflowError
from verl_workflow.storage import Store
from verl_workflow.workflow._attempt import Call, Continued, Outcome, Raised, Returned
from verl_workflow.workflow._definition import key_of, read_definition, seed_of
from verl_workflow.workflow._earlier import EarlierResult, cache_key_of, keep_result, read_earlier
from verl_workflow.workflow._flight import Flight, Flying
from verl_workflow.workflow._fold import Folded
from verl_workflow.workflow._graph import Graph, Names
from verl_workflow.workflow._heartbeat import INTERVAL_S, LEASE_S, Heartbeat
from verl_workflow.workflow._journal import Journal, deleted
from verl_workflow.workflow._known import KnownValues
from verl_workflow.workflow._launch import Launcher
from verl_workflow.workflow._names import RunKey, path_part
from verl_workflow.workflow._node import steps_of
from verl_workflow.workflow._owner import this_process
from verl_workflow.workflow._ownership import take_over
from verl_workflow.workflow._plan import Plan, Step
from verl_workflow.workflow._records import (
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
from verl_workflow.workflow._schedule import Schedule
from verl_workflow.workflow._state import RunState, read_graph, read_run
from verl_workflow.workflow._values import Codec, Value

_log = logging.getLogger(__name__)


class Driver:
    """Runs a plan to its end, or takes it up where another driver left it.

    Guarantees: each step is committed exactly once and never executed after its commit; it may be executed more than
    once before. A driver that has lost the run commits nothing any more.

    Args:
        plan: the same for each driver of a run; a graph's last step is what is wanted of it, a `Plan`'s are all.
        owner: who this is, by default the calling process; see `this_process`.
        run: which of the runs that may have borne the id; default: the one that does now.
        reset: what to execute again although it is committed.
        force: take the run even from an owner that shows signs of life; that one is fenced and stops.
        lease_s: how long an owner's heartbeat must be seen unchanged before it is given up.
        heartbeat_s: between signs of life. poll_s: between looks for requests to cancel and for other drivers.

    Raises:
        UserError(RUN_UNKNOWN): there is no such run. FencedError: another one bears its id now.
    """

    def __init__(
        self,
        store: Store,
        run_id: str,
        plan: Plan | Graph,
        launcher: Launcher,
        owner: Mapping[str, Any] | None = None,
        *,
        run: RunKey | None = None,
        reset: StepsReset | None = None,
        force: bool = False,
        lease_s: float = LEASE_S,
        heartbeat_s: float = INTERVAL_S,
        poll_s: float = 0.5,
    ) -> None:
        self._store = store
        self._definition = read_definition(store, run_id)
        self._run = key_of(self._definition)
        if run is not None and run != self._run:
            raise deleted(run.run_id)
        self._schedule = Schedule(self._load_continuation)
        # Of a graph's many small steps hardly any says how far it is, and each would cost a read.
        self._reports = isinstance(plan, Plan)
        if isinstance(plan, Plan):
            steps = plan.in_order()
            self._targets = [step.name for step in steps]
            self._remedy = "Wait for it to end, or take the run from it with --force."
        else:
            self._remedy = (
                f"Wait for it to end, or stop it with workflow.cancel({run_id!r}). Once it shows no sign of life for "
                f"{lease_s:g} s, the workflow can be taken up with workflow.resume({run_id!r})."
            )
            steps = steps_of(plan, Names().give(node.name for node in plan.nodes), store)
            self._targets = [steps[-1].name]
        self._names = [step.name for step in steps]
        self._schedule.add(steps)
        self._owner = dict(owner) if owner is not None else this_process()
        self._reset = reset
        self._force = force
        self._lease_s = lease_s
        self._heartbeat_s = heartbeat_s
        self._poll_s = poll_s
        self._journal = Journal(store, self._run)
        self._values = KnownValues(self._journal, store)
        # Steps whose inputs are there, with the monotonic time before which they must not start.
        self._ready: dict[str, float] = {}
        self._flight = Flight(launcher, store, self._run)
        # What is to be written with the next entry, and launched after it.
        self._events: list[Event] = []
        self._launches: list[Flying] = []
        self._given = Names()
        self._error: dict[str, Any] | None = None

    def run(self) -> RunState:
        """As `drive`, and read what came of it.

        Returns:
            SUCCEEDED, FAILED or CANCELLED. The error of a failed run is in the state; it is not raised.
        """
        self.drive()
        return read_run(self._store, self._run.run_id, progress=self._reports)

    def drive(self) -> None:
        """Drive the run until it has ended.

        Raises:
            UserError: RUN_TERMINAL when the run has succeeded or was cancelled; RUN_OWNED when another driver shows
                signs of life (watching for them takes up to `lease_s`).
            FencedError: another driver has taken the run, or it was deleted; the running steps were stopped.
            VerlWorkflowError: JOURNAL_DAMAGED; STORAGE when the storage fails. The run can be resumed.
        """
        take_over(
            self._journal,
            self._store,
            self._run,
            owner=self._owner,
            steps=self._names,
            seed=seed_of(self._definition),
            reset=self._reset,
            remedy=self._remedy,
            force=self._force,
            lease_s=self._lease_s,
        )
        beat = Heartbeat(
            self._store, self._run, epoch=self._journal.epoch, owner=self._owner, interval_s=self._heartbeat_s
        )
        with beat:
            try:
                self._replay(self._journal.state)
                self._drive(cancelled=self._journal.state.cancel_requested)
            finally:
                self._flight.stop_all()

    def _replay(self, folded: Folded) -> None:
        self._given = Names(folded.steps)
        for name, known in folded.steps.items():
            if known.continued is not None and known.committed is None:
                self._schedule.continues(name, known.continued.steps)
            if known.settled and known.committed is not None:
                self._schedule.has(name)
        now, clock = time.time(), time.monotonic()
        wanted = list(self._schedule.want(self._targets))
        self._error = folded.first_failure(wanted)
        for name in wanted:
            known, step = folded.step(name), self._schedule.step(name)
            # Never longer than the pause itself: the clock that wrote it may be ahead.
            failures = max(known.failures + known.crashes, 1)
            pause = min((known.retry_at or now) - now, step.retry.pause_s(failures))
            self._ready[name] = clock + max(pause, 0.0)

    def _drive(self, *, cancelled: bool) -> None:
        """Start, await and settle attempts, until the run's end is written."""
        next_poll = 0.0
        cancelling = False
        while True:
            if time.monotonic() >= next_poll:
                self._journal.poll()
                next_poll = time.monotonic() + self._poll_s
            if (cancelled or self._journal.cancel_requested) and not cancelling:
                cancelling = True
                self._flight.stop_all()
            if not cancelling and self._error is None:
                self._begin_due()
            elif not cancelling:
                self._flight.drop_waits()
            end = self._end(cancelling)
            if end is not None:
                self._events.append(end)
            self._flush()
            if end is not None:
                return
            if self._journal.cancel_requested and not cancelling:
                # Met while these were written: they are not to begin.
                self._launches.clear()
                continue
            for attempt in self._launches:
                self._flight.start(attempt)
            self._launches.clear()
            self._flight.wait(min([next_poll, *(self._ready.values() if self._error is None else ())]))
            for attempt, outcome in self._flight.landed():
                self._settle(attempt, outcome, cancelling)
            self._flight.stop_late()

    def _end(self, cancelling: bool) -> Event | None:
        if len(self._flight) or self._launches:
            return None
        if self._schedule.unfinished == 0 and self._error is None:
            return RunSucceeded()
        if cancelling:
            return RunCancelled()
        return None if self._error is None else RunFailed(error=self._error)

    def _begin_due(self) -> None:
        # A step that is taken from an earlier run makes others ready at once.
        while self._error is None and (due := [name for name, at in self._ready.items() if at <= time.monotonic()]):
            for name in due:
                del self._ready[name]
                self._begin(self._schedule.step(name))
                if self._error is not None:
                    return

    def _begin(self, step: Step) -> None:
        try:
            cache_key = cache_key_of(step, self._values.loaded(self._sources(step))) if step.key is not None else None
        except Exception as error:  # noqa: BLE001 - it ends the step, with its cause in the journal
            self._fail(step, self._number(step), Raised.of(error), will_retry=False)
            return
        if cache_key is not None and self._take_earlier(step, cache_key):
            return
        attempt = self._number(step)
        inputs, held = self._values.for_call(self._sources(step))
        call = Call(
            call=step.call,
            store=self._store,
            run=self._run,
            step=step.name,
            attempt=attempt,
            epoch=self._journal.epoch,
            inputs=inputs,
            value_key=self._value_key(step, attempt),
            codec=step.codec,
            kept=self._kept(step),
            clocked=step.start_to_close_s is not None or step.heartbeat_s is not None,
            heartbeat_s=step.heartbeat_s,
        )
        self._launches.append(Flying(step=step, call=call, held=held, cache_key=cache_key))

    def _kept(self, step: Step) -> bool:
        """What the whole run is for is always written down."""
        return step.kept or any(self._schedule.source(target) == step.name for target in self._targets)

    def _number(self, step: Step) -> int:
        """Open a new attempt in the journal."""
        attempt = self._journal.state.step(step.name).last_number + 1
        self._events.append(StepStarted(step=step.name, attempt=attempt))
        return attempt

    def _take_earlier(self, step: Step, cache_key: str) -> bool:
        try:
            if (earlier := read_earlier(self._store, cache_key)) is None:
                return False
            if step.verify is not None:
                step.verify(earlier.value)
        except Exception as error:  # noqa: BLE001 - whatever is wrong with it, the step can still run
            _log.info("step %s runs: the earlier result %s cannot be used: %s", step.name, cache_key, error)
            return False
        self._commit(step, 0, earlier.to_value(), reused_from=earlier.run_id)
        return True

    def _settle(self, ended: Flying, outcome: Outcome, cancelling: bool) -> None:
        step = ended.step
        if isinstance(outcome, Returned):
            if ended.cache_key is not None:
                # Before the commit: should this driver die in between, the next one finds the result here.
                value = outcome.value.load(self._store, step.name)
                keep_result(self._store, ended.cache_key, EarlierResult(run_id=self._run.run_id, value=value))
            self._commit(step, ended.attempt, outcome.value, held=outcome.held)
        elif isinstance(outcome, Continued) and ended.dropped:
            stopped = ended.stopped or VerlWorkflowError(ErrorCode.CANCELLED, "nobody wants it any more")
            self._fail(step, ended.attempt, Raised.of(stopped), will_retry=False, fatal=False)
        elif isinstance(outcome, Continued):
            self._continue(step, ended.attempt, outcome)
        elif cancelling:
            # Ended by us; the run's own record says so.
            return
        elif ended.dropped:
            self._fail(step, ended.attempt, outcome, will_retry=False, fatal=False)
        elif outcome.lost_inputs:
            lost = [source for source in self._sources(step).values() if self._values.is_held(source)]
            self._fail(step, ended.attempt, dataclasses.replace(outcome, crash=True), will_retry=True)
            for name in lost:
                self._values.drop(name)
            ready, waiting = self._schedule.lose(lost, self._flight.steps())
            for name in waiting:
                self._ready.pop(name, None)
            self._make_ready(ready)
        else:
            known = self._journal.state.step(step.name)
            failures, crashes = known.failures + (not outcome.crash), known.crashes + outcome.crash
            again = outcome.retryable and step.retry.again(failures, crashes, crash=outcome.crash)
            if not again and not outcome.crash and outcome.pickle is not None and self._caught(step, ended, outcome):
                return
            self._fail(step, ended.attempt, outcome, will_retry=again)

    def _commit(
        self, step: Step, attempt: int, value: Value, *, held: Any = None, reused_from: str | None = None
    ) -> None:
        # Of a caught error the record says that it is one.
        kept = self._kept(step) or value.codec is Codec.CAUGHT
        if not kept:
            self._values.hold(step.name, held)
        else:
            value = self._values.stored(value, self._value_key(step, attempt))
        self._record(StepSucceeded.of(step.name, attempt, value, kept=kept, reused_from=reused_from))
        self._advance(*self._schedule.finish(step.name))

    def _continue(self, step: Step, attempt: int, outcome: Continued) -> None:
        names = self._given.give(outcome.names)
        self._events.append(
            StepContinued(
                step=step.name, attempt=attempt, graph_key=outcome.graph_key, sha256=outcome.sha256, steps=names
            )
        )
        graph = read_graph(self._store, outcome.graph_key, outcome.sha256)
        self._advance(*self._schedule.go_on(step.name, steps_of(graph, names, self._store)))

    def _caught(self, step: Step, ended: Flying, outcome: Raised) -> bool:
        """Make an error the value of the step, or of the nearest one that led to it, that catches errors."""
        assert outcome.pickle is not None
        value = Value.of(outcome.pickle, Codec.CAUGHT)
        if step.catches:
            self._commit(step, ended.attempt, value, held=outcome.pickle)
            return True
        for scope in self._schedule.scopes(step.name):
            catcher = self._schedule.step(scope)
            if not catcher.catches:
                continue
            self._fail(step, ended.attempt, outcome, will_retry=False, fatal=False)
            stopped = VerlWorkflowError(ErrorCode.CANCELLED, f"step {step.name} beside it has failed", where=scope)
            below = set(self._schedule.drop_below(scope))
            self._flight.drop(below, stopped)
            self._ready = {name: at for name, at in self._ready.items() if name not in below}
            self._record(StepSucceeded.of(scope, 0, self._values.stored(value, self._value_key(catcher, 0))))
            self._advance(*self._schedule.settle(scope))
            return True
        return False

    def _advance(self, ready: list[str], unused: list[str]) -> None:
        self._make_ready(ready)
        for name in filter(self._values.drop, unused):
            self._schedule.drop(name)

    def _make_ready(self, names: Iterable[str]) -> None:
        self._ready.update(dict.fromkeys(names, 0.0))

    def _fail(self, step: Step, attempt: int, outcome: Raised, *, will_retry: bool, fatal: bool = True) -> None:
        known = self._journal.state.step(step.name)
        pause = step.retry.pause_s(known.failures + known.crashes + 1) if will_retry else 0.0
        error = outcome.to_json(step.name)
        self._events.append(
            StepFailed(
                step=step.name,
                attempt=attempt,
                error=error,
                will_retry=will_retry,
                retry_in_s=pause,
                crash=outcome.crash,
            )
        )
        _log.warning("attempt %d of step %s failed: %s", attempt, step.name, error["message"])
        if will_retry:
            self._ready[step.name] = time.monotonic() + pause
        elif fatal and self._error is None:
            self._error = error

    def _flush(self) -> None:
        if self._events:
            events, self._events = self._events, []
            self._journal.append(*events)
            self._values.written()

    def _record(self, event: StepSucceeded) -> None:
        self._events.append(event)
        self._values.record(event)

    def _value_key(self, step: Step, attempt: int) -> str:
        return f"{self._run.folder}/values/{path_part(step.name)}-{self._journal.epoch}-{attempt}"

    def _sources(self, step: Step) -> dict[str, str]:
        return {name: self._schedule.source(name) for name in step.after}

    def _load_continuation(self, name: str) -> list[Step]:
        continued = self._journal.state.step(name).continued
        assert continued is not None
        graph = read_graph(self._store, continued.graph_key, continued.sha256)
        return steps_of(graph, continued.steps, self._store)
