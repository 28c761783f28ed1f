"""What ray.workflow 2.47 got wrong when a process had died or lost its workflow, seen to be right here."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
import tempfile
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import ray
from _flows import (
    add,
    end_hosts,
    executions,
    go,
    hosts,
    kill_driver,
    mark,
    marked,
    named,
    started,
    steps_of,
    store,
    until,
    waiting,
    waits_for,
)

from verl_workflow import workflow
from verl_workflow.errors import FencedError, VerlWorkflowError
from verl_workflow.storage import Store
from verl_workflow.workflow import Driver, InlineLauncher, _session
from verl_workflow.workflow._definition import run_key
from verl_workflow.workflow._state import read_graph

pytestmark = pytest.mark.usefixtures("flows")


def test_a_damaged_workflow_keeps_no_other_from_being_resumed(flows: Path, marks: Path) -> None:
    """Fault 9."""
    lost = {name: workflow.run_async(_second_time.bind(marks, name), workflow_id=name) for name in ("a", "b", "c", "d")}
    for name in lost:
        started(marks, name)
    end_hosts()
    until(lambda: {status for _, status in workflow.list_all()} == {workflow.RESUMABLE}, "end of the drivers")
    (flows / run_key(store(), "a").folder / "journal" / "000000000000.json").write_text("{")
    for file in (flows / run_key(store(), "b").folder / "graphs").iterdir():
        file.write_bytes(b"")
    resumed = dict(workflow.resume_all())
    assert ray.get([resumed["c"], resumed["d"]]) == ["c", "d"]
    assert "a" not in resumed
    assert dict(workflow.list_all())["a"] is workflow.DAMAGED
    with pytest.raises(VerlWorkflowError, match=r"000000000000\.json"):
        workflow.get_status("a")
    workflow.delete("a")
    assert [name for name, _ in workflow.list_all()] == ["b", "c", "d"]


@ray.remote
def _second_time(folder: Path, name: str) -> str:
    """Waits at its first execution for good."""
    if mark(folder, name) == 1:
        waits_for(folder, f"{name}-waits")
    return name


class Died(BaseException):
    """Stands for the end of the caller's process."""


def dying(function: Callable[..., Any], point: int, count: Iterator[int]) -> Callable[..., Any]:
    """The function; the caller dies before or after one of all calls that are counted."""

    def call(*args: Any, **more: Any) -> Any:
        if next(count) == point:
            raise Died
        found = function(*args, **more)
        if next(count) == point:
            raise Died
        return found

    return call


def test_a_caller_who_dies_at_any_point_of_a_start_blocks_neither_this_workflow_nor_others(
    tmp_path: Path, marks: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fault 10."""
    workflow.init(storage=str(tmp_path / "queue"), max_running_workflows=1, max_pending_workflows=0)
    for point in itertools.count():
        name = f"w{point}"
        dag = marked.bind(marks, name, point)
        with monkeypatch.context() as patched:
            count = itertools.count()
            patched.setattr(_session, "ask", dying(_session.ask, point, count))
            patched.setattr(Store, "create", dying(Store.create, point, count))
            try:
                workflow.run(dag, workflow_id=name)
                break
            except Died:
                pass
        if name in dict(workflow.list_all()):
            until(lambda name=name: workflow.get_status(name) is workflow.SUCCESSFUL, f"end of {name}", 20)
        assert workflow.run(dag, workflow_id=name) == point
        assert executions(marks, name) == 1
    assert point >= 6


@pytest.mark.fault
def test_a_queue_outlives_the_process_that_holds_it(tmp_path: Path, marks: Path) -> None:
    """Fault 10."""
    workflow.init(storage=str(tmp_path / "queue"), max_running_workflows=1)
    refs = [workflow.run_async(waiting.bind(marks, "a", 0), workflow_id="w0")]
    started(marks, "a")
    refs += [workflow.run_async(marked.bind(marks, f"b{n}", n), workflow_id=f"w{n}") for n in (1, 2)]
    kill_driver("w0")
    go(marks)
    assert ray.get(refs, timeout=60) == [0, 1, 2]
    assert [executions(marks, f"b{n}") for n in (1, 2)] == [1, 1]


@pytest.mark.fault
def test_a_second_cluster_on_the_same_storage_does_not_run_what_the_first_one_runs(flows: Path, marks: Path) -> None:
    """Fault 15."""
    script = """
        import sys, ray
        from verl_workflow import workflow
        ray.init(address="local", num_cpus=1, include_dashboard=False, log_to_driver=False,
                 _temp_dir=sys.argv[2])
        workflow.init(storage=sys.argv[1])
        @ray.remote
        def other(): return "other"
        for ask in (lambda: workflow.run(other.bind(), workflow_id="w"), lambda: workflow.resume("w")):
            try:
                print(ask())
            except RuntimeError as error:
                print(error)
        print(workflow.resume_all(include_failed=True), workflow.get_status("w").value)
        print(workflow.run(other.bind(), workflow_id="mine"))
    """
    ref = workflow.run_async(waiting.bind(marks, "a", "first"), workflow_id="w")
    started(marks, "a")
    with tempfile.TemporaryDirectory(prefix="vw-", dir="/tmp", ignore_cleanup_errors=True) as short:
        other = subprocess.run(
            [sys.executable, "-c", textwrap.dedent(script), str(flows), short],
            stdout=subprocess.PIPE,
            text=True,
            timeout=120,
            check=True,
        )
    refused = "Workflow 'w' is already running or pending."
    assert other.stdout.splitlines() == [refused, refused, "[] RUNNING", "other"]
    go(marks)
    assert ray.get(ref) == "first"
    assert executions(marks, "a") == 1
    assert workflow.get_output("mine") == "other"


def test_a_driver_whose_workflow_was_taken_commits_nothing_any_more(marks: Path) -> None:
    """Fault 15."""
    ref = workflow.run_async(waiting.options(**named("a")).bind(marks, "a", "x"), workflow_id="w")
    started(marks, "a")
    record = workflow.read_run(store(), "w").definition["workflow"]
    graph = read_graph(store(), record["graph"], record["sha256"])
    taker = Driver(store(), "w", graph, InlineLauncher(), force=True)
    until(lambda: workflow.get_status("w") is workflow.RUNNING, "driver")
    thread = threading.Thread(target=taker.run)
    thread.start()
    until(lambda: executions(marks, "a") == 2, "second execution")
    (host,) = hosts()
    assert isinstance(ray.get(host.wait.remote("w"), timeout=30), FencedError | type(None))
    assert workflow.get_status("w") is workflow.RUNNING
    go(marks)
    thread.join()
    assert ray.get(ref) == "x"
    commits = [
        (entry["epoch"], event["attempt"])
        for entry in map(json.loads, map(store().get, store().list(f"{run_key(store(), 'w').folder}/journal")))
        for event in entry["events"]
        if event["kind"] == "step_succeeded"
    ]
    assert commits == [(2, 2)]


@pytest.mark.fault
def test_workflows_go_on_when_the_process_that_drives_them_is_killed(marks: Path) -> None:
    """Fault 19."""
    first = marked.bind(marks, "first", 1)
    ref = workflow.run_async(add.bind(first, waiting.bind(marks, "second", 2, first)), workflow_id="w")
    started(marks, "second")
    killed = kill_driver("w")
    until(lambda: executions(marks, "second") == 2, "second execution")
    owner = workflow.read_run(store(), "w").owner
    assert owner is not None
    assert owner["pid"] != killed
    go(marks)
    assert ray.get(ref, timeout=60) == 3
    assert workflow.get_status("w") is workflow.SUCCESSFUL
    assert executions(marks, "first") == 1
    assert workflow.run(add.bind(1, 1), workflow_id="another") == 2


@pytest.mark.fault
def test_a_sleep_is_not_begun_anew_when_its_driver_is_killed(marks: Path) -> None:
    """Fault 19."""
    duration = 20.0
    before = time.monotonic()
    ref = workflow.run_async(workflow.sleep(duration), workflow_id="w")
    until(lambda: any("wake_time" in name and step.committed for name, step in steps_of("w")), "time to wake up at")
    begun = time.monotonic()
    # In the middle: a driver that comes back slowly is there in time, one that slept anew is far too late.
    time.sleep(duration / 2)
    kill_driver("w")
    assert ray.get(ref, timeout=90) is None
    assert time.monotonic() - before >= duration
    times = workflow.get_metadata("w")["stats"]
    assert times["end_time"] - times["start_time"] < begun - before + 1.5 * duration


@pytest.mark.fault
def test_a_host_that_was_ended_for_good_is_replaced_when_it_is_needed(marks: Path) -> None:
    """Fault 19."""
    assert workflow.run(add.bind(1, 2)) == 3
    workflow.run_async(_second_time.bind(marks, "w"), workflow_id="w")
    started(marks, "w")
    end_hosts()
    assert workflow.run(add.bind(3, 4)) == 7
    assert workflow.get_status("w") is workflow.RESUMABLE
    assert workflow.resume("w") == "w"
