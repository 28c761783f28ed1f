"""A workflow against a simple model of it, under every order of what can happen to it."""

from __future__ import annotations

import itertools
import json
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, InvalidStateError
from typing import Any

import pytest
from _pieces import Crash, described, of_kind
from _pieces import journal as records_of
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from verl_workflow import workflow
from verl_workflow.errors import ErrorCode, FencedError, UserError, VerlWorkflowError
from verl_workflow.storage import Store
from verl_workflow.workflow import Driver, Plan, RetryPolicy, RunStatus, Step, create_run, read_run, request_cancel
from verl_workflow.workflow._attempt import Call, Outcome, Raised, Returned
from verl_workflow.workflow._definition import run_key
from verl_workflow.workflow._heartbeat import heartbeat_key, read_heartbeat
from verl_workflow.workflow._values import Codec, Value

RUN = "r"
STEPS = ("a", "b", "c")
ATTEMPTS = 2
PATIENCE_S = 20.0
_NUMBERS = itertools.count()


class Mortal(Store):
    """A driver's storage, until the driver dies."""

    dead = False

    def create(self, key: str, data: bytes) -> bool:
        self._live()
        return super().create(key, data)

    def put(self, key: str, data: bytes) -> None:
        self._live()
        super().put(key, data)

    def get(self, key: str) -> bytes | None:
        self._live()
        return super().get(key)

    def _live(self) -> None:
        if self.dead:
            # Hearts beat in a thread that others share.
            if threading.current_thread().name == "heartbeats":
                raise VerlWorkflowError(ErrorCode.STORAGE, "the process is dead")
            raise Crash


class Held:
    """A launcher whose attempts end when the test says so."""

    def __init__(self) -> None:
        self.running: dict[str, Future[Outcome]] = {}

    def start(self, step: Step, call: Call, held: tuple[Any, ...] = ()) -> Future[Outcome]:
        self.running[step.name] = Future()
        return self.running[step.name]

    def cancel(self, future: Future[Outcome]) -> None:
        try:
            future.set_result(Raised.of(VerlWorkflowError(ErrorCode.CANCELLED, "stopped", retryable=True)))
        except InvalidStateError:
            return


class Owner:
    """A driver in a thread."""

    def __init__(self, uri: str) -> None:
        retry = RetryPolicy(attempts=ATTEMPTS, backoff_s=0.0)
        steps = [
            Step(name=name, call=lambda context: None, after=STEPS[max(number - 1, 0) : number], retry=retry)
            for number, name in enumerate(STEPS)
        ]
        self.store = Mortal(uri)
        self.launcher = Held()
        self.error: BaseException | None = None
        self._driver = Driver(
            self.store, RUN, Plan(steps=tuple(steps)), self.launcher, force=True, heartbeat_s=0.01, poll_s=0.005
        )
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()

    def _run(self) -> None:
        try:
            self._driver.run()
        except BaseException as error:  # noqa: BLE001 - what it was is looked at by the test
            self.error = error

    def ended(self) -> BaseException | None:
        self.thread.join(PATIENCE_S)
        assert not self.thread.is_alive()
        return self.error


def eventually(holds: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not holds():
        assert time.monotonic() < deadline, what
        time.sleep(0.002)


class Workflow(RuleBasedStateMachine):
    """The model: where the run stands, which steps are done, and how often the present one has failed."""

    def __init__(self) -> None:
        super().__init__()
        self.uri = f"memory://model-{next(_NUMBERS)}"
        self.store = Store(self.uri)
        workflow.init(storage=self.uri)
        self.owner: Owner | None = None
        self.status: RunStatus | None = None
        self.done: list[str] = []
        self.failures = 0
        self.epoch = 0

    @property
    def present(self) -> str:
        return STEPS[len(self.done)]

    @precondition(lambda self: self.status is None)
    @rule()
    def create(self) -> None:
        create_run(self.store, RUN, described(STEPS[-1]))
        self.status, self.done, self.failures, self.epoch = RunStatus.PENDING, [], 0, 0

    @precondition(lambda self: self.status is not None)
    @rule()
    def create_again_is_refused(self) -> None:
        with pytest.raises(UserError) as caught:
            create_run(self.store, RUN, {})
        assert caught.value.code is ErrorCode.RUN_EXISTS

    @precondition(
        lambda self: self.status in {RunStatus.PENDING, RunStatus.RESUMABLE, RunStatus.FAILED, RunStatus.RUNNING}
    )
    @rule()
    def take(self) -> None:
        """A driver claims the run, whether new, left, failed or in the hands of another one."""
        before, self.owner = self.owner, Owner(self.uri)
        if self.status is RunStatus.FAILED:
            self.failures = 0
        self.status, self.epoch = RunStatus.RUNNING, self.epoch + 1
        self._awaits_present()
        if before is not None:
            assert isinstance(before.ended(), FencedError)

    @precondition(lambda self: self.status in {RunStatus.SUCCEEDED, RunStatus.CANCELLED})
    @rule()
    def taking_what_has_ended_is_refused(self) -> None:
        error = Owner(self.uri).ended()
        assert isinstance(error, UserError)
        assert error.code is ErrorCode.RUN_TERMINAL

    @precondition(lambda self: self.owner is not None)
    @rule(number=st.integers())
    def step_ok(self, number: int) -> None:
        assert self.owner is not None
        value = Value.of(str(number).encode(), Codec.JSON)
        self.owner.launcher.running.pop(self.present).set_result(Returned(value=value))
        self.done.append(self.present)
        self.failures = 0
        if len(self.done) == len(STEPS):
            self._ends(RunStatus.SUCCEEDED)
        else:
            self._awaits_present()

    @precondition(lambda self: self.owner is not None)
    @rule()
    def step_fails(self) -> None:
        assert self.owner is not None
        self.failures += 1
        self.owner.launcher.running.pop(self.present).set_result(Raised.of(RuntimeError("no")))
        if self.failures < ATTEMPTS:
            self._awaits_present()
        else:
            self._ends(RunStatus.FAILED)

    @precondition(lambda self: self.owner is not None)
    @rule()
    def crash(self) -> None:
        assert self.owner is not None
        self.owner.store.dead = True
        assert isinstance(self.owner.ended(), Crash)
        # Others know at once that it is gone, as they do of a dead process; this one lives on.
        last = read_heartbeat(self.store, run_key(self.store, RUN)) or {}
        self.store.put(
            heartbeat_key(run_key(self.store, RUN)),
            json.dumps({**last, "epoch": self.epoch, "released": True}).encode(),
        )
        self.owner, self.status = None, RunStatus.RESUMABLE

    @precondition(lambda self: self.status is not None)
    @rule()
    def cancel(self) -> None:
        if self.status in {RunStatus.SUCCEEDED, RunStatus.FAILED}:
            with pytest.raises(UserError) as caught:
                request_cancel(self.store, RUN)
            assert caught.value.code is ErrorCode.RUN_TERMINAL
            return
        request_cancel(self.store, RUN)
        if self.owner is not None:
            self._ends(RunStatus.CANCELLED)
        elif self.status is not RunStatus.CANCELLED:
            self.status, self.epoch = RunStatus.CANCELLED, self.epoch + 1

    @precondition(lambda self: self.status is not None)
    @rule()
    def delete(self) -> None:
        if self.status in {RunStatus.RUNNING, RunStatus.PENDING}:
            with pytest.raises(workflow.WorkflowStillActiveError):
                workflow.delete(RUN)
            return
        workflow.delete(RUN)
        self.status = None
        assert self.store.list(f"runs/{RUN}") == []

    @precondition(lambda self: self.status is None)
    @rule()
    def what_is_not_there_is_not_found(self) -> None:
        for call in (workflow.get_status, workflow.delete, workflow.cancel, workflow.resume, workflow.get_output):
            with pytest.raises(workflow.WorkflowNotFoundError):
                call(RUN)
        assert self.store.list(f"runs/{RUN}") == []

    @invariant()
    def agrees(self) -> None:
        if self.status is None:
            assert workflow.list_all() == []
            return
        state = read_run(self.store, RUN)
        assert state.status is self.status
        assert state.epoch == self.epoch
        records = records_of(self.store, RUN)
        assert [record["step"] for record in of_kind(records, "step_succeeded")] == self.done
        assert [record["time"] for record in records] == sorted(record["time"] for record in records)
        if self.status is RunStatus.SUCCEEDED:
            assert workflow.get_output(RUN) == state.steps[STEPS[-1]].value

    def teardown(self) -> None:
        if self.owner is not None:
            self.owner.store.dead = True
            self.owner.ended()

    def _awaits_present(self) -> None:
        owner, name = self.owner, self.present
        assert owner is not None
        eventually(lambda: name in owner.launcher.running or owner.error is not None, f"{name} is not started")
        assert owner.error is None

    def _ends(self, status: RunStatus) -> None:
        assert self.owner is not None
        assert self.owner.ended() is None
        self.owner, self.status = None, status


TestWorkflow = Workflow.TestCase
TestWorkflow.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
