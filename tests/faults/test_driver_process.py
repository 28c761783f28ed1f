"""Drivers as processes of their own, killed, frozen and woken up."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from verl_workflow.storage import Store
from verl_workflow.workflow import RunState, RunStatus, StepStatus, create_run, read_run
from verl_workflow.workflow._definition import run_key

HERE = Path(__file__).parent
pytestmark = [pytest.mark.fault, pytest.mark.slow]


@pytest.fixture
def store(tmp_path: Path) -> Store:
    (tmp_path / "marks").mkdir()
    found = Store(str(tmp_path / "storage"))
    create_run(found, "r", {"folder": str(tmp_path / "marks")})
    return found


class Victim:
    """A driver process whose steps run in threads, or on a local Ray of its own."""

    def __init__(self, storage: str, kind: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, str(HERE / "_victim_driver.py"), storage, "r", kind],
            stdout=subprocess.PIPE,
            text=True,
            env={
                **os.environ,
                "PYTHONPATH": os.pathsep.join([str(HERE.parent / "workflow"), os.environ.get("PYTHONPATH", "")]),
                # A loaded machine takes longer to start a cluster than Ray waits by default.
                "RAY_raylet_start_wait_time_s": "120",
            },
            start_new_session=True,
        )
        self._seen: set[psutil.Process] = set()

    def kill(self) -> None:
        self._look()
        self.process.kill()
        self.process.wait(20)

    def output(self) -> list[str]:
        return self.process.communicate(timeout=180)[0].split()

    def clean_up(self) -> None:
        """End the process and what it has started."""
        self._look()
        for process in self._seen:
            if process.is_running():
                process.kill()
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait(20)

    def _look(self) -> None:
        if self.process.poll() is None:
            self._seen |= set(psutil.Process(self.process.pid).children(recursive=True))


@pytest.fixture
def started(store: Store) -> Iterator[Callable[[str], Victim]]:
    victims: list[Victim] = []

    def start(kind: str) -> Victim:
        victims.append(Victim(store.uri, kind))
        return victims[-1]

    yield start
    for victim in victims:
        victim.clean_up()


def until(store: Store, ready: Callable[[RunState], bool]) -> RunState:
    for _ in range(1200):
        state = read_run(store, "r")
        if ready(state):
            return state
        time.sleep(0.1)
    raise AssertionError(f"it did not come to that: {state}")


def gate_runs_under(epoch: int) -> Callable[[RunState], bool]:
    def ready(state: RunState) -> bool:
        return state.epoch == epoch and state.steps["gate"].status is StepStatus.RUNNING

    return ready


def records(store: Store, kind: str) -> list[dict[str, Any]]:
    entries = [json.loads(store.get(key) or b"") for key in store.list(f"{run_key(store, 'r').folder}/journal")]
    found = [{**entry, **event} for entry in entries for event in entry.pop("events")]
    return [record for record in found if record["kind"] == kind]


def test_a_killed_driver_is_followed_by_another_on_a_fresh_cluster(
    tmp_path: Path, store: Store, started: Callable[[str], Victim]
) -> None:
    first = started("ray")
    until(store, gate_runs_under(1))
    mark = tmp_path / "marks" / "gate.1.1"
    until(store, lambda _: mark.exists() and mark.read_text() != "")
    worker = psutil.Process(int(mark.read_text()))
    first.kill()
    # The worker of a step dies with the driver that owns it.
    worker.wait(60)
    assert read_run(store, "r").status is RunStatus.RESUMABLE

    (tmp_path / "marks" / "go").touch()
    assert started("ray").output() == ["succeeded"]
    state = read_run(store, "r")
    assert state.steps["last"].value == 3
    assert sorted(record["step"] for record in records(store, "step_succeeded")) == ["first", "gate", "last"]
    assert [path.name for path in (tmp_path / "marks").glob("first.*")] == ["first.1.1"]
    assert [attempt.number for attempt in state.steps["gate"].attempts] == [1, 2]


def test_a_frozen_driver_wakes_up_to_find_itself_replaced(
    tmp_path: Path, store: Store, started: Callable[[str], Victim]
) -> None:
    loser = started("threads")
    until(store, gate_runs_under(1))
    os.kill(loser.process.pid, signal.SIGSTOP)
    winner = started("threads")
    until(store, gate_runs_under(2))
    (tmp_path / "marks" / "go").touch()
    assert winner.output() == ["succeeded"]
    won = store.list(f"{run_key(store, 'r').folder}/journal")
    # Its own step has a result by now, and must not be committed.
    os.kill(loser.process.pid, signal.SIGCONT)
    assert loser.process.wait(180) == 1
    assert store.list(f"{run_key(store, 'r').folder}/journal") == won
    assert [record["epoch"] for record in records(store, "claimed")] == [1, 2]
    assert all(record["epoch"] == 2 for record in records(store, "step_succeeded") if record["step"] != "first")
