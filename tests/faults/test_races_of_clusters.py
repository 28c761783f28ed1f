"""Two drivers on two clusters and one storage: one is frozen past its lease, replaced, and woken up again."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from verl_workflow.errors import ErrorCode
from verl_workflow.storage import Store
from verl_workflow.workflow import RunStatus, create_run, read_run
from verl_workflow.workflow._dag import DagView, is_node
from verl_workflow.workflow._definition import run_key
from verl_workflow.workflow._graph import Names, StepNode, graph_of
from verl_workflow.workflow._names import RunKey
from verl_workflow.workflow._node import save_graph
from verl_workflow.workflow._options import StepOptions

HERE = Path(__file__).parent
LEASE_S = 0.4
STEPS = 8
pytestmark = pytest.mark.fault


def one_more(number: int) -> int:
    import time

    time.sleep(0.03)
    return number + 1


def record(store: Store, run_id: str) -> None:
    """A workflow of a chain of steps, as `workflow.run` records it."""
    root: Any = 0
    for number in range(STEPS):
        root = StepNode(one_more, (root,), {}, StepOptions(task_id=f"s{number}", ray={"num_cpus": 0}))
    key = RunKey.new(run_id)
    graph = graph_of(root, DagView(), store, f"{key.folder}/objects", is_node=is_node)
    saved = save_graph(graph, store, key.folder)
    workflow = {"graph": saved.graph_key, "sha256": saved.sha256, "root": Names().give(saved.names)[-1], "metadata": {}}
    create_run(store, run_id, {"workflow": workflow}, incarnation=key.incarnation)


def records(store: Store, run_id: str) -> list[dict[str, Any]]:
    entries = [json.loads(store.get(key) or b"") for key in store.list(f"{run_key(store, run_id).folder}/journal")]
    return [{**entry, **event} for entry in entries for event in entry.pop("events")]


class Cluster:
    """A process with a local Ray that drives what it is told."""

    def __init__(self, storage: str) -> None:
        environment = {**os.environ, "PYTHONPATH": f"{HERE}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"}
        self.process = subprocess.Popen(
            [sys.executable, str(HERE / "_racing_driver.py"), storage, str(LEASE_S)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
            start_new_session=True,
        )

    def drive(self, run_id: str) -> None:
        assert self.process.stdin is not None
        print(run_id, file=self.process.stdin, flush=True)

    def answer(self) -> list[str]:
        assert self.process.stdout is not None
        return self.process.stdout.readline().split()

    def stop(self) -> None:
        """End the process and the cluster it has started, and nothing else."""
        os.kill(self.process.pid, signal.SIGCONT)
        started = psutil.Process(self.process.pid).children(recursive=True)
        assert self.process.stdin is not None
        self.process.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(60)
        for process in started:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        self.process.kill()
        self.process.wait(20)


@pytest.fixture
def clusters(store: Store) -> Iterator[list[Cluster]]:
    both = [Cluster(store.uri), Cluster(store.uri)]
    try:
        for cluster in both:
            assert cluster.answer() == ["ready"]
        yield both
    finally:
        for cluster in both:
            cluster.stop()


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(str(tmp_path / "storage"))


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("races", [8, pytest.param(200, marks=pytest.mark.slow)])
def test_a_frozen_driver_that_wakes_up_has_lost_and_commits_nothing(
    store: Store, clusters: list[Cluster], races: int
) -> None:
    chance = random.Random(7)
    fenced = crashed = 0
    for race in range(races):
        run_id = f"race-{race}"
        record(store, run_id)
        # They take turns at losing.
        loser, winner = clusters[race % 2], clusters[1 - race % 2]
        loser.drive(run_id)
        deadline = time.monotonic() + 60
        while not any(each["kind"] == "step_started" for each in records(store, run_id)):
            assert time.monotonic() < deadline
            time.sleep(0.005)
        time.sleep(chance.uniform(0.0, 0.2))
        os.kill(loser.process.pid, signal.SIGSTOP)
        winner.drive(run_id)
        if chance.random() < 0.5:
            # Woken up when the winner has ended it; else in the middle of that.
            assert winner.answer()[0] == run_id
            won = True
        else:
            while read_run(store, run_id).epoch < 2 and read_run(store, run_id).status is not RunStatus.SUCCEEDED:
                time.sleep(0.005)
            won = False
        os.kill(loser.process.pid, signal.SIGCONT)
        answer = loser.answer()
        if not answer:
            # Ray 2.60 ends a process in which a task's result arrives just as it is cancelled: it has lost too.
            assert loser.process.wait(60) != 0
            crashed += 1
            clusters[race % 2] = Cluster(store.uri)
            assert clusters[race % 2].answer() == ["ready"]
        how = answer[1] if answer else ErrorCode.FENCED.value
        if not won:
            assert winner.answer()[0] == run_id

        found = records(store, run_id)
        assert read_run(store, run_id).status is RunStatus.SUCCEEDED
        commits = [each["step"] for each in found if each["kind"] == "step_succeeded"]
        assert sorted(commits) == [f"s{number}" for number in range(STEPS)]
        epochs = [each["epoch"] for each in found]
        assert epochs == sorted(epochs)
        if max(epochs) == 2:
            assert how == "fenced"
            fenced += 1
        else:
            # It had ended the run before it was frozen.
            assert how == "succeeded"
    assert fenced > races / 2
    # One may happen in any number of races.
    assert crashed <= max(1, races / 20)
