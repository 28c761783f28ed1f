"""Nodes of a cluster are lost while a workflow runs: that of a worker, and that of its driver."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from verl_workflow import workflow
from verl_workflow.storage import Store
from verl_workflow.workflow import RunState, RunStatus, StepStatus, read_run

pytestmark = [pytest.mark.fault, pytest.mark.slow, pytest.mark.timeout(600)]
PATIENCE_S = 180.0


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Any]:
    """A head without room for anything, and two nodes beside it, each of a kind of its own."""
    import ray
    from ray.cluster_utils import Cluster

    found = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False})
    ray.init(address=found.address, log_to_driver=False)
    workflow.init(storage=str(tmp_path / "storage"))
    try:
        yield found
    finally:
        ray.shutdown()
        found.shutdown()


@pytest.fixture
def ray_cluster() -> Iterator[Any]:
    """A local Ray of this process. Its sockets need a short path."""
    import ray

    folder = tempfile.mkdtemp(prefix="vw-", dir="/tmp")
    ray.init(address="local", num_cpus=2, include_dashboard=False, log_to_driver=False, _temp_dir=folder)
    try:
        yield ray
    finally:
        ray.shutdown()
        shutil.rmtree(folder, ignore_errors=True)


def until(store: Store, ready: Any, what: str) -> RunState:
    deadline = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline:
        state = read_run(store, "r")
        if ready(state):
            return state
        time.sleep(0.1)
    raise AssertionError(f"{what}: {state}")


def graph(folder: Path) -> Any:
    """A step that is over at once, one that waits for a file, and one that counts how often they ran."""
    import ray

    @ray.remote(num_cpus=1)
    def first(folder: str) -> int:
        (Path(folder) / f"first-{os.getpid()}").touch()
        return 1

    @ray.remote(num_cpus=1)
    def gate(folder: str, number: int) -> int:
        (Path(folder) / f"gate-{os.getpid()}").touch()
        while not (Path(folder) / "go").exists():
            time.sleep(0.1)
        return number + 1

    return gate.options(**workflow.options(task_id="gate")).bind(
        str(folder), first.options(**workflow.options(task_id="first")).bind(str(folder))
    )


def test_a_workflow_outlives_the_node_of_its_worker(cluster: Any, tmp_path: Path) -> None:
    import ray

    store = Store(str(tmp_path / "storage"))
    # Its limits told, the host is started now, where there is only the head for it.
    workflow.init(storage=store.uri, max_running_workflows=-1)
    lost = cluster.add_node(num_cpus=1)
    ref = workflow.run_async(graph(tmp_path), workflow_id="r")
    until(store, lambda _: any(tmp_path.glob("gate-*")), "the step has begun")
    cluster.remove_node(lost, allow_graceful=False)
    cluster.add_node(num_cpus=1)
    until(store, lambda _: len(list(tmp_path.glob("gate-*"))) == 2, "the step has begun again")
    (tmp_path / "go").touch()
    assert ray.get(ref, timeout=PATIENCE_S) == 2
    state = read_run(store, "r")
    assert state.epoch == 1
    assert [attempt.status for attempt in state.steps["gate"].attempts] == [StepStatus.FAILED, StepStatus.SUCCEEDED]
    assert len(list(tmp_path.glob("first-*"))) == 1


def test_the_driver_comes_back_by_itself_when_its_node_is_lost(cluster: Any, tmp_path: Path) -> None:
    import ray

    store = Store(str(tmp_path / "storage"))
    # The host may be on the head all the same.
    node = cluster.add_node(num_cpus=1)
    ref = workflow.run_async(graph(tmp_path), workflow_id="r")
    state = until(store, lambda _: any(tmp_path.glob("gate-*")), "the step has begun")
    assert state.owner is not None
    cluster.add_node(num_cpus=1)
    host_node = next((each for each in (node, cluster.head_node) if _runs_on(each, state.owner["pid"])), None)
    assert host_node is not None
    if host_node is cluster.head_node:
        # Lost without its node then, which here comes to the same.
        os.kill(state.owner["pid"], 9)
    else:
        cluster.remove_node(host_node, allow_graceful=False)
    until(store, lambda now: now.epoch == 2 and now.status is RunStatus.RUNNING, "another driver has the workflow")
    (tmp_path / "go").touch()
    assert ray.get(ref, timeout=PATIENCE_S) == 2
    found = read_run(store, "r")
    assert found.status is RunStatus.SUCCEEDED
    assert len(list(tmp_path.glob("first-*"))) == 1


HEAD = """
import sys
from pathlib import Path

import ray

sys.path.insert(0, sys.argv[1])
from test_lost_nodes import graph
from verl_workflow import workflow

folder = Path(sys.argv[2])
ray.init(address="local", num_cpus=1, include_dashboard=False, log_to_driver=False, _temp_dir=sys.argv[3])
workflow.init(storage=str(folder / "storage"))
workflow.run(graph(folder), workflow_id="r")
"""


def test_a_workflow_whose_head_was_lost_is_resumed_on_another_cluster(tmp_path: Path, ray_cluster: Any) -> None:
    store = Store(str(tmp_path / "storage"))
    with tempfile.TemporaryDirectory(prefix="vw-", dir="/tmp") as folder:
        arguments = [sys.executable, "-c", HEAD, str(Path(__file__).parent), str(tmp_path), folder]
        head = subprocess.Popen(arguments, start_new_session=True)
        try:
            until_exists(tmp_path, "gate-*")
        finally:
            # The head, its only node, and the user's process: they share what setsid has made.
            killed = []
            for process in psutil.process_iter():
                with contextlib.suppress(psutil.NoSuchProcess, ProcessLookupError, PermissionError):
                    if os.getsid(process.pid) == head.pid:
                        process.kill()
                        killed.append(process)
            head.wait(30)
            # A killed process is there until it has given its memory back.
            psutil.wait_procs(killed, timeout=30)
    workflow.init(storage=store.uri)
    assert workflow.get_status("r") is workflow.RESUMABLE
    assert workflow.list_all(workflow.RESUMABLE) == [("r", workflow.RESUMABLE)]
    (tmp_path / "go").touch()
    [(workflow_id, ref)] = workflow.resume_all()
    assert (workflow_id, ray_cluster.get(ref, timeout=PATIENCE_S)) == ("r", 2)
    assert len(list(tmp_path.glob("first-*"))) == 1
    assert read_run(store, "r").epoch == 2


def until_exists(folder: Path, pattern: str) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not any(folder.glob(pattern)):
        assert time.monotonic() < deadline, f"no {pattern}"
        time.sleep(0.1)


def _runs_on(node: Any, pid: int) -> bool:
    raylet = node.all_processes["raylet"][0].process.pid
    return any(parent.pid == raylet for parent in psutil.Process(pid).parents())
