"""A host's queue as others see it from afar, and as a rebuilt host takes it up."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import ray
from _flows import (
    executions,
    go,
    kill_driver,
    marked,
    refusing_until,
    started,
    store,
    until,
    waiting,
)

from verl_workflow import workflow
from verl_workflow.workflow._definition import delete_run

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
