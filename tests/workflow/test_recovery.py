"""A host's queue as others see it from afar, and as a rebuilt host takes it up."""

from __future__ import annotations

import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import ray
from _flows import (
    executions,
    go,
    kill_driver,
    marked,
    named,
    refusing_until,
    started,
    store,
    until,
    waiting,
)

from verl_workflow import workflow
from verl_workflow.errors import ErrorCode, UserError, VerlWorkflowError
from verl_workflow.workflow import _ending, _session
from verl_workflow.workflow._definition import delete_run, run_key
from verl_workflow.workflow._heartbeat import Heartbeat
from verl_workflow.workflow._journal import Journal
from verl_workflow.workflow._records import Claimed, RunFailed

pytestmark = pytest.mark.usefixtures("flows")

CANCEL = """
import sys
import ray
from verl_workflow import workflow

workflow.init(storage=sys.argv[1])
workflow.cancel(sys.argv[2])
assert not ray.is_initialized()
print(workflow.get_status(sys.argv[2]).value)
"""


def cancel_from_afar(workflow_id: str) -> str:
    """Cancel in a process that has no way to the cluster; gives the status that it sees."""
    done = subprocess.run(
        [sys.executable, "-c", CANCEL, store().uri, workflow_id], capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def failed(workflow_id: str, marks: Path) -> None:
    with pytest.raises(workflow.WorkflowExecutionError):
        workflow.run(refusing_until.bind(marks, workflow_id, "mended"), workflow_id=workflow_id)


def test_a_failed_workflow_is_taken_out_of_the_queue_without_a_way_to_the_cluster(tmp_path: Path, marks: Path) -> None:
    workflow.init(storage=str(tmp_path / "queue"), max_running_workflows=1)
    failed("failed", marks)
    slow = workflow.run_async(waiting.bind(marks, "slow"), workflow_id="slow")
    started(marks, "slow")
    taken_up = workflow.resume_async("failed")
    behind = workflow.run_async(marked.bind(marks, "behind", 2), workflow_id="behind")
    until(lambda: workflow.get_status("failed") is workflow.PENDING, "queued resume")
    assert cancel_from_afar("failed") == "FAILED"
    # Its place is free for it, though the host has not come to it yet.
    again = workflow.resume_async("failed")
    until(lambda: workflow.get_status("failed") is workflow.PENDING, "queued resume")
    assert cancel_from_afar("failed") == "FAILED"
    go(marks)
    (marks / "mended").touch()
    assert ray.get([slow, behind], timeout=120) == [None, 2]
    for reference in (taken_up, again):
        with pytest.raises(workflow.WorkflowExecutionError):
            ray.get(reference, timeout=120)
    assert executions(marks, "failed") == 1
    # It may be taken up again.
    assert workflow.resume("failed") is None


def test_a_workflow_that_the_storage_does_not_give_keeps_no_other_from_being_taken_up(
    tmp_path: Path, marks: Path
) -> None:
    workflow.init(storage=str(tmp_path / "queue"), max_running_workflows=2)
    first = {name: workflow.run_async(waiting.bind(marks, name, name), workflow_id=name) for name in ("a", "b")}
    behind = workflow.run_async(marked.bind(marks, "behind", 3), workflow_id="behind")
    for name in first:
        started(marks, name)
    lost = tmp_path / "queue" / "runs" / "a" / "definition.json"
    kept = lost.rename(tmp_path / "kept.json")
    # Nobody can read it, and it is not missing.
    lost.symlink_to(lost.name)
    kill_driver("b")
    go(marks)
    assert ray.get([first["b"], behind], timeout=120) == ["b", 3]
    assert workflow.run(marked.bind(marks, "new", 4), workflow_id="new") == 4
    kept.replace(lost)
    assert ray.get(first["a"], timeout=120) == "a"


def test_the_id_of_one_that_waits_is_free_when_it_was_deleted_from_afar(tmp_path: Path, marks: Path) -> None:
    workflow.init(storage=str(tmp_path / "queue"), max_running_workflows=1)
    slow = workflow.run_async(waiting.bind(marks, "slow"), workflow_id="slow")
    started(marks, "slow")
    workflow.run_async(marked.bind(marks, "first", 1), workflow_id="w")
    assert cancel_from_afar("w") == "CANCELED"
    delete_run(store(), "w")
    again = workflow.run_async(marked.bind(marks, "second", 2), workflow_id="w")
    go(marks)
    assert ray.get([slow, again], timeout=120) == [None, 2]
    assert (executions(marks, "first"), executions(marks, "second")) == (0, 1)


def test_who_waits_while_the_host_is_rebuilt_is_told_of_no_error(marks: Path) -> None:
    ref = workflow.run_async(waiting.options(**named("only")).bind(marks, "w", 3), workflow_id="w")
    started(marks, "w")
    asked = [workflow.get_output_async("w"), workflow.get_output_async("w", task_id="only")]
    got: list[Any] = []
    waiters = [threading.Thread(target=lambda: got.append(workflow.get_output("w"))) for _ in range(2)]
    waiters[0].start()
    kill_driver("w")
    # One more, who begins when nobody drives it.
    waiters[1].start()
    until(lambda: executions(marks, "w") == 2, "second execution")
    go(marks)
    assert ray.get([ref, *asked], timeout=120) == [3, 3, 3]
    for waiter in waiters:
        waiter.join(60)
    assert got == [3, 3]


def test_a_driver_that_is_refused_leaves_no_turn_behind(tmp_path: Path, marks: Path) -> None:
    """Or the workflow would wait for it, as others see it, when it fails later."""
    workflow.init(storage=str(tmp_path / "taken"))
    failed("w", marks)
    kept = store()
    run = run_key(kept, "w")
    other = Journal(kept, run)
    other.read()
    assert other.claim(Claimed(owner={"pid": 1, "host": "elsewhere"}, steps=[]))
    until(lambda: workflow.get_status("w") is workflow.RUNNING, "another driver")
    beat = Heartbeat(kept, run, epoch=other.epoch, owner={"pid": 1, "host": "elsewhere"}, interval_s=0.2)
    with beat:
        # As if it had been looked at before the other one came.
        mark = _session.ask("submit", "w", workflow.read_run(kept, "w").epoch, _session.client().caller(), None)
        stopped = _session.ask("wait", "w", mark)
        assert stopped.code is ErrorCode.RUN_OWNED
        other.append(RunFailed(error={"what": "failed elsewhere"}))
    assert workflow.get_status("w") is workflow.FAILED
    (marks / "mended").touch()
    assert workflow.resume("w") is None


def test_a_workflow_that_cannot_be_begun_does_not_seem_to_wait(tmp_path: Path, marks: Path) -> None:
    workflow.init(storage=str(tmp_path / "graphs"), max_running_workflows=1)
    slow = workflow.run_async(waiting.bind(marks, "slow"), workflow_id="slow")
    started(marks, "slow")
    ref = workflow.run_async(marked.bind(marks, "next", 7), workflow_id="next")
    until(lambda: workflow.get_status("next") is workflow.PENDING, "queue")
    (graph,) = (tmp_path / "graphs" / run_key(store(), "next").folder / "graphs").iterdir()
    whole = graph.read_bytes()
    graph.write_bytes(whole[:10])
    go(marks)
    with pytest.raises(VerlWorkflowError, match="not the graph of steps that was recorded"):
        ray.get(ref, timeout=60)
    assert workflow.get_status("next") is workflow.RESUMABLE
    with pytest.raises(VerlWorkflowError, match="not the graph of steps that was recorded"):
        workflow.resume("next")
    graph.write_bytes(whole)
    assert workflow.resume("next") == 7
    assert ray.get(slow) is None


def test_a_cancel_that_comes_too_late_says_so(marks: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The request is written, and the driver writes the end before it meets that."""
    workflow.run_async(waiting.bind(marks, "w", 1), workflow_id="w")
    started(marks, "w")

    def late(*_: Any) -> None:
        go(marks)
        until(lambda: workflow.get_status("w") is workflow.SUCCESSFUL, "end")

    monkeypatch.setattr(_ending, "request_cancel", late)
    with pytest.raises(UserError, match="has succeeded") as caught:
        workflow.cancel("w")
    assert caught.value.code is ErrorCode.RUN_TERMINAL
