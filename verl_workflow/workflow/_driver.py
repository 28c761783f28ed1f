"""The single writer of a run: claims it, replays its journal, and executes what is left."""

from __future__ import annotations

import hashlib
import json
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from verl_workflow.errors import ErrorCode, FencedError, UserError, VerlWorkflowError
from verl_workflow.storage import Store
from verl_workflow.workflow import _records as records
from verl_workflow.workflow._identity import is_dead, this_process
from verl_workflow.workflow._journal import Journal, fenced
from verl_workflow.workflow._launch import Launcher
from verl_workflow.workflow._plan import Plan, Step, StepContext
from verl_workflow.workflow._state import (
    FINAL_STATES,
    STALE_S,
    RunState,
    RunStatus,
    StepStatus,
    fold,
    load_value,
    read_run,
)

HEARTBEAT_S = 2.0
_POLL_S = 0.2
_LOOK_S = 1.0


@dataclass(kw_only=True)
class _Running:
    step: Step
    attempt: int
    started: float


@dataclass(kw_only=True)
class Driver:
    """Executes a plan as the run `run_id`, whose definition is stored already.

    Guarantees: each step is committed exactly once; it may be executed more than once, never after its commit. Of two
    drivers the newer commits, and the older raises `FencedError` without having committed anything since.

    Attributes:
        owner: who this is, as from `this_process`.
        lease_s: seconds that the owner's heartbeat must stand still before the run is taken from it.
        force: take the run at once.
    """

    store: Store
    run_id: str
    plan: Plan
    launcher: Launcher
    owner: Mapping[str, Any] = field(default_factory=this_process)
    lease_s: float = STALE_S
    force: bool = False

    def run(self) -> RunState:
        """Drive the run to its end and return what became of it.

        Raises:
            UserError(RUN_OWNED): another driver is alive. FencedError: one has taken over. VerlWorkflowError: the storage
            failed, or the journal is damaged; the run can be resumed.
        """
        self._journal = Journal(self.store, self.run_id)
        self._journal.read()
        if fold(self.run_id, self._journal.records).status in FINAL_STATES:
            return read_run(self.store, self.run_id)
        self._claim()
        beating = threading.Event()
        heart = threading.Thread(target=self._beat, args=(beating,), name="heartbeat", daemon=True)
        heart.start()
        try:
            self._execute()
        finally:
            beating.set()
            heart.join(HEARTBEAT_S)
        return read_run(self.store, self.run_id)

    # Taking the run

    def _claim(self) -> None:
        state = fold(self.run_id, self._journal.records)
        if state.status is RunStatus.RUNNING and not self.force:
            assert state.owner is not None
            if not is_dead(state.owner) and dict(state.owner) != dict(self.owner):
                self._watch(state)
        self.epoch = self._journal.epoch + 1
        self._journal.append(records.Claimed, epoch=self.epoch, owner=dict(self.owner))

    def _watch(self, state: RunState) -> None:
        """Return when the owner has given no sign of life for the lease, by this process's own clock."""
        key = f"runs/{self.run_id}/heartbeat.json"
        seen = self.store.get(key)
        deadline = time.monotonic() + self.lease_s
        while time.monotonic() < deadline:
            time.sleep(min(_POLL_S, self.lease_s))
            if self.store.get(key) != seen or self._journal.read():
                owner = dict(state.owner or {})
                raise UserError(
                    ErrorCode.RUN_OWNED,
                    "another driver is working on this run",
                    where=self.run_id,
                    value=f"pid {owner.get('pid')} on {owner.get('host')}",
                    remedy="Let it work, cancel the run, or take it over with --force.",
                )

    def _beat(self, stop: threading.Event) -> None:
        number = 0
        while True:
            number += 1
            body = {"epoch": self.epoch, "owner": dict(self.owner), "time": time.time(), "n": number}
            try:
                self.store.put(f"runs/{self.run_id}/heartbeat.json", json.dumps(body).encode())
            except VerlWorkflowError:
                # Missed beats make the run look abandoned, which is the truth if the storage stays away.
                pass
            if stop.wait(HEARTBEAT_S):
                return

    # Doing the steps

    def _execute(self) -> None:
        self._values: dict[str, Any] = {}
        self._attempts: dict[str, int] = {}
        for record in self._journal.records:
            if isinstance(record, records.StepSucceeded):
                self._values[record.step] = load_value(self.store, self.run_id, record)
            if isinstance(record, records.StepStarted):
                self._attempts[record.step] = max(record.attempt, self._attempts.get(record.step, 0))
        self._tried: dict[str, int] = {}
        self._not_before: dict[str, float] = {}
        self._running: dict[Any, _Running] = {}
        self._failure: Mapping[str, Any] | None = None
        look = 0.0
        try:
            while True:
                if time.monotonic() >= look:
                    self._listen()
                    look = time.monotonic() + _LOOK_S
                if self._journal.cancel_requested():
                    self._stop_all()
                    self._journal.append(records.RunCancelled, epoch=self.epoch)
                    return
                if self._failure is None:
                    self._start_ready()
                if not self._running and self._finish():
                    return
                self._collect()
        except BaseException:
            self._stop_all()
            raise

    def _listen(self) -> None:
        self._journal.read()
        if self._journal.epoch > self.epoch:
            raise fenced(self.run_id, self.epoch, self._journal.epoch)

    def _start_ready(self) -> None:
        busy = {running.step.name for running in self._running.values()}
        for step in self.plan.steps:
            if step.name in self._values or step.name in busy:
                continue
            if not all(name in self._values for name in step.after):
                continue
            if time.monotonic() < self._not_before.get(step.name, 0.0):
                continue
            self._start(step)

    def _start(self, step: Step) -> None:
        inputs = {name: self._values[name] for name in step.after}
        attempt = self._attempts.get(step.name, 0) + 1
        self._attempts[step.name] = attempt
        self._tried[step.name] = self._tried.get(step.name, 0) + 1
        self._journal.append(records.StepStarted, epoch=self.epoch, step=step.name, attempt=attempt)
        try:
            earlier = self._earlier(step, inputs)
        except UserError as error:
            self._fail(step, attempt, error.to_json())
            return
        if earlier is not None:
            value, run_id = earlier
            self._commit(step, attempt, json.dumps(value).encode(), reused_from=run_id)
            return
        context = StepContext(
            run_id=self.run_id, step=step.name, attempt=attempt, epoch=self.epoch, inputs=inputs, store=self.store
        )
        handle = self.launcher.start(step, context)
        self._running[handle] = _Running(step=step, attempt=attempt, started=time.monotonic())

    def _earlier(self, step: Step, inputs: Mapping[str, Any]) -> tuple[Any, str] | None:
        """A stored result that can stand in for the step, and the run it is from."""
        if step.key is None or (data := self.store.get(f"cache/{step.key(inputs)}.json")) is None:
            return None
        try:
            entry = json.loads(data)
            value, run_id = entry["value"], entry["run_id"]
            if step.verify is not None:
                step.verify(value)
        except (ValueError, KeyError, VerlWorkflowError):
            # Gone or changed since: it is made again, which is always right.
            return None
        return value, run_id

    def _collect(self) -> None:
        if not self._running:
            time.sleep(_POLL_S)
            return
        for handle, outcome in self.launcher.ended(list(self._running), _POLL_S).items():
            running = self._running.pop(handle)
            if outcome.error is not None:
                self._fail(running.step, running.attempt, outcome.error)
            else:
                assert outcome.value is not None
                self._commit(running.step, running.attempt, outcome.value)
        for handle, running in list(self._running.items()):
            limit = running.step.timeout_s
            if limit is not None and time.monotonic() - running.started > limit:
                self.launcher.cancel(handle)
                del self._running[handle]
                late = VerlWorkflowError(
                    ErrorCode.STEP_TIMEOUT,
                    f"the step was stopped after its time limit of {limit:g} s",
                    where=running.step.name,
                    remedy="Raise its timeout, or find out what it waits for.",
                    retryable=True,
                )
                self._fail(running.step, running.attempt, late.to_json())

    def _commit(self, step: Step, attempt: int, value: bytes, *, reused_from: str | None = None) -> None:
        key = f"runs/{self.run_id}/values/{step.name}-{self.epoch}-{attempt}.json"
        self.store.put(key, value)
        self._journal.append(
            records.StepSucceeded,
            epoch=self.epoch,
            step=step.name,
            attempt=attempt,
            value_key=key,
            sha256=hashlib.sha256(value).hexdigest(),
            reused_from=reused_from,
        )
        self._values[step.name] = json.loads(value)
        if step.key is not None and reused_from is None:
            entry = {"run_id": self.run_id, "step": step.name, "value": self._values[step.name]}
            inputs = {name: self._values[name] for name in step.after}
            self.store.put(f"cache/{step.key(inputs)}.json", json.dumps(entry).encode())

    def _fail(self, step: Step, attempt: int, error: Mapping[str, Any]) -> None:
        tried = self._tried[step.name]
        retry = bool(error.get("retryable")) and tried < step.retry.attempts and self._failure is None
        self._journal.append(
            records.StepFailed, epoch=self.epoch, step=step.name, attempt=attempt, error=dict(error), will_retry=retry
        )
        if retry:
            self._not_before[step.name] = time.monotonic() + step.retry.wait_s(tried)
        elif self._failure is None:
            self._failure = {**error, "step": step.name}

    def _finish(self) -> bool:
        """End the run when there is nothing left to do; True when it has ended."""
        if self._failure is not None:
            self._journal.append(records.RunFailed, epoch=self.epoch, error=dict(self._failure))
            return True
        if all(step.name in self._values for step in self.plan.steps):
            self._journal.append(records.RunSucceeded, epoch=self.epoch)
            return True
        return False

    def _stop_all(self) -> None:
        for handle in self._running:
            self.launcher.cancel(handle)
        self._running = {}


__all__ = ["Driver", "FencedError", "StepStatus"]
