from __future__ import annotations

import multiprocessing
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from _graphs import node, record, run_graph
from _pieces import IMPATIENT, Marking, diamond, drive, executions, journal, of_kind

from verl_workflow.errors import ErrorCode, FencedError, UserError
from verl_workflow.storage import Store
from verl_workflow.workflow import (
    Driver,
    InlineLauncher,
    Plan,
    RunStatus,
    Step,
    StepContext,
    create_run,
    read_run,
)
from verl_workflow.workflow._heartbeat import heartbeat_key
from verl_workflow.workflow._journal import Journal
from verl_workflow.workflow._records import CancelRequested, Claimed, StepStarted


class Gate:
    """Holds a driver up right before it writes to a key with `part` in it."""

    def __init__(self, uri: str, part: str) -> None:
        self.reached, self.open = threading.Event(), threading.Event()
        gate = self

        class Gated(Store):
            def create(self, key: str, data: bytes) -> bool:
                gate.pass_by(key + data.decode(), part)
                return super().create(key, data)

            def put(self, key: str, data: bytes) -> None:
                gate.pass_by(key, part)
                super().put(key, data)

        self.store = Gated(uri)

    def pass_by(self, text: str, part: str) -> None:
        if part in text:
            self.reached.set()
            assert self.open.wait(30)


@pytest.mark.parametrize("part", ["step_started", "/values/", "step_succeeded", "run_succeeded"])
def test_a_driver_that_was_paused_and_replaced_stops_and_commits_nothing(store: Store, marks: Path, part: str) -> None:
    create_run(store, "r", {})
    gate = Gate(store.uri, part)
    raised: list[BaseException] = []

    def lose() -> None:
        try:
            drive(gate.store, "r", diamond(marks))
        except FencedError as error:
            raised.append(error)

    loser = threading.Thread(target=lose)
    loser.start()
    assert gate.reached.wait(20)
    state = drive(store, "r", diamond(marks))
    assert (state.status, state.epoch) == (RunStatus.SUCCEEDED, 2)
    won = journal(store, "r")
    gate.open.set()
    loser.join(20)
    assert [type(error) for error in raised] == [FencedError]
    assert journal(store, "r") == won
    assert read_run(store, "r").steps == state.steps


def test_a_fenced_driver_stops_its_running_steps(store: Store) -> None:
    create_run(store, "r", {})
    started, release = threading.Event(), threading.Event()

    def hang(context: StepContext) -> int:
        if context.epoch == 1:
            started.set()
            release.wait(30)
        return context.epoch

    class Noting(InlineLauncher):
        def __init__(self) -> None:
            super().__init__()
            self.cancelled = 0

        def cancel(self, future: Any) -> None:
            self.cancelled += 1
            super().cancel(future)

    plan = Plan(steps=(Step(name="a", call=hang, retry=IMPATIENT),))
    launcher = Noting()
    raised: list[BaseException] = []

    def lose() -> None:
        try:
            Driver(store, "r", plan, launcher, poll_s=0.02).run()
        except FencedError as error:
            raised.append(error)

    loser = threading.Thread(target=lose)
    loser.start()
    try:
        assert started.wait(20)
        assert drive(store, "r", plan, force=True).steps["a"].value == 2
        loser.join(20)
        assert len(raised) == launcher.cancelled == 1
    finally:
        release.set()


def test_a_driver_that_shows_signs_of_life_keeps_the_run(store: Store) -> None:
    create_run(store, "r", {})
    started, release = threading.Event(), threading.Event()

    def wait(context: StepContext) -> int:
        started.set()
        release.wait(30)
        return 1

    plan = Plan(steps=(Step(name="a", call=wait),))
    results = []
    owner = threading.Thread(target=lambda: results.append(drive(store, "r", plan, heartbeat_s=0.1)))
    owner.start()
    try:
        assert started.wait(20)
        with pytest.raises(UserError) as caught:
            drive(store, "r", plan, lease_s=20.0)
        assert caught.value.code is ErrorCode.RUN_OWNED
        assert "--force" in str(caught.value)
    finally:
        release.set()
        owner.join(20)
    assert results[0].status is RunStatus.SUCCEEDED
    assert len(of_kind(journal(store, "r"), "claimed")) == 1


def _until_told(folder: Path) -> None:
    (folder / "started").touch()
    _await_file(folder / "go")


def _await_file(path: Path) -> None:
    deadline = time.monotonic() + 30
    while not path.exists():
        assert time.monotonic() < deadline, f"there is no {path}"
        time.sleep(0.01)


def test_whoever_finds_a_workflow_driven_elsewhere_is_told_what_can_be_done(store: Store, marks: Path) -> None:
    graph = record(store, "w", node(_until_told, marks))
    owner = threading.Thread(target=lambda: run_graph(store, "w", graph, heartbeat_s=0.1))
    owner.start()
    try:
        _await_file(marks / "started")
        with pytest.raises(UserError) as caught:
            run_graph(store, "w", graph, lease_s=20.0)
    finally:
        (marks / "go").touch()
        owner.join(20)
    assert caught.value.code is ErrorCode.RUN_OWNED
    assert caught.value.remedy == (
        "Wait for it to end, or stop it with workflow.cancel('w'). Once it shows no sign of life for 20 s, the "
        "workflow can be taken up with workflow.resume('w')."
    )


def test_a_late_heartbeat_does_not_speak_for_the_new_owner(store: Store) -> None:
    from verl_workflow.workflow._heartbeat import Heartbeat, read_heartbeat

    key = create_run(store, "r", {})
    store.put(heartbeat_key(key), b'{"epoch": 2, "n": 7}')
    with Heartbeat(store, key, epoch=1, owner={}, interval_s=0.01):
        pass
    assert read_heartbeat(store, key) == {"epoch": 2, "n": 7}


def test_a_heart_that_the_storage_keeps_waiting_stops_no_other(store: Store) -> None:
    from verl_workflow.workflow._heartbeat import Heartbeat, read_heartbeat

    released = threading.Event()
    slow = create_run(store, "slow", {})

    class Slow(Store):
        def put(self, key: str, data: bytes) -> None:
            if key == heartbeat_key(slow) and b'"n": 1,' not in data:
                released.wait(60)
            super().put(key, data)

    quick = create_run(store, "quick", {})

    def beats() -> int:
        return int((read_heartbeat(store, quick) or {}).get("n", 0))

    with (
        Heartbeat(Slow(store.uri), slow, epoch=1, owner={}, interval_s=0.01),
        Heartbeat(store, quick, epoch=1, owner={}, interval_s=0.01),
    ):
        deadline = time.monotonic() + 30
        while beats() < 50 and time.monotonic() < deadline:
            time.sleep(0.01)
        found = beats()
        released.set()
    assert found >= 50


def test_an_owner_takes_requests_in_and_meets_a_newer_claim(store: Store) -> None:
    key = create_run(store, "r", {})
    owner, other = Journal(store, key), Journal(store, key)
    assert owner.claim(Claimed(owner={}, steps=[]))
    other.read()
    other.request(CancelRequested(by={}))
    owner.append(StepStarted(step="a", attempt=1))
    assert owner.length == 3
    assert owner.cancel_requested
    other.read()
    assert other.claim(Claimed(owner={}, steps=[]))
    for late in (lambda: owner.append(StepStarted(step="b", attempt=1)), owner.poll):
        with pytest.raises(FencedError):
            late()
    assert len(journal(store, "r")) == 4


def test_an_entry_whose_answer_got_lost_is_known_as_ones_own(store: Store) -> None:
    class Deaf(Store):
        def create(self, key: str, data: bytes) -> bool:
            # As S3's client sees it: written, the answer lost, asked again, refused.
            return super().create(key, data) and False

    log = Journal(Deaf(store.uri), create_run(store, "r", {}))
    assert log.claim(Claimed(owner={}, steps=[]))
    log.append(StepStarted(step="a", attempt=1))
    assert log.length == 2
    assert [record["kind"] for record in journal(store, "r")] == ["claimed", "step_started"]


def _race(uri: str, folder: str, run_ids: list[str], barrier: Any, results: Any) -> None:
    store = Store(uri)
    for run_id in run_ids:
        barrier.wait(60)
        plan = Plan(steps=(Step(name="a", call=Marking(Path(folder) / run_id)),))
        try:
            results.put((run_id, Driver(store, run_id, plan, InlineLauncher(), lease_s=5.0).run().status.value))
        except UserError as error:
            results.put((run_id, error.code.value))
        barrier.wait(60)


@pytest.mark.fault
def test_of_six_processes_that_claim_a_run_one_gets_it(store: Store, marks: Path) -> None:
    run_ids = [f"race-{number}" for number in range(10)]
    for run_id in run_ids:
        create_run(store, run_id, {})
        (marks / run_id).mkdir()
    context = multiprocessing.get_context("spawn")
    barrier, results = context.Barrier(6), context.Queue()
    racers = [context.Process(target=_race, args=(store.uri, str(marks), run_ids, barrier, results)) for _ in range(6)]
    for racer in racers:
        racer.start()
    found = [results.get(timeout=120) for _ in range(6 * len(run_ids))]
    for racer in racers:
        racer.join(60)
    for run_id in run_ids:
        ends = sorted(end for name, end in found if name == run_id)
        assert ends.count("succeeded") == 1
        assert set(ends) <= {"succeeded", "run_owned", "run_terminal"}
        assert executions(marks / run_id, "a") == [(1, 1)]
        assert [record["kind"] for record in journal(store, run_id)] == [
            "claimed",
            "step_started",
            "step_succeeded",
            "run_succeeded",
        ]
