"""How many workflows run and wait at a time, as `workflow.init` says it."""

from __future__ import annotations

import queue
import time
from pathlib import Path

import pytest
import ray
from _flows import add, executions, go, kill_driver, mark, marked, started, until, waiting

from verl_workflow import workflow

pytestmark = pytest.mark.usefixtures("flows")


def test_workflows_wait_for_their_turn_and_too_many_are_refused(tmp_path: Path, marks: Path) -> None:
    workflow.init(storage=str(tmp_path / "queue"), max_running_workflows=1, max_pending_workflows=1)
    first = workflow.run_async(waiting.bind(marks, "a", 1), workflow_id="first")
    second = workflow.run_async(marked.bind(marks, "b", 2), workflow_id="second")
    started(marks, "a")
    assert workflow.get_status("second") is workflow.PENDING
    assert workflow.list_all("PENDING") == [("second", workflow.PENDING)]
    with pytest.raises(queue.Full, match="Workflow queue has been full"):
        workflow.run_async(marked.bind(marks, "c", 3), workflow_id="third")
    assert [name for name, _ in workflow.list_all()] == ["first", "second"]
    with pytest.raises(RuntimeError, match="already running or pending"):
        workflow.run(add.bind(1, 1), workflow_id="second")
    with pytest.raises(workflow.WorkflowStillActiveError):
        workflow.delete("second")
    assert executions(marks, "b") == 0
    go(marks)
    assert ray.get([first, second]) == [1, 2]
    assert workflow.run(marked.bind(marks, "c", 3), workflow_id="third") == 3


def test_a_pending_workflow_that_is_cancelled_leaves_the_queue_at_once(tmp_path: Path, marks: Path) -> None:
    workflow.init(storage=str(tmp_path / "queue"), max_running_workflows=1, max_pending_workflows=1)
    first = workflow.run_async(waiting.bind(marks, "a", 1), workflow_id="first")
    second = workflow.run_async(marked.bind(marks, "b", 2), workflow_id="second")
    started(marks, "a")
    before = time.monotonic()
    workflow.cancel("second")
    assert time.monotonic() - before < 5
    assert workflow.get_status("second") is workflow.CANCELED
    third = workflow.run_async(marked.bind(marks, "c", 3), workflow_id="third")
    with pytest.raises(workflow.WorkflowCancellationError):
        ray.get(second)
    go(marks)
    assert ray.get([first, third]) == [1, 3]
    assert executions(marks, "b") == 0


@ray.remote(num_cpus=0)
def fails_once(folder: Path, name: str) -> int:
    if mark(folder, name) == 1:
        raise KeyError(name)
    return 7


def test_a_failed_workflow_that_waits_to_be_taken_up_is_pending(tmp_path: Path, marks: Path) -> None:
    workflow.init(storage=str(tmp_path / "queue"), max_running_workflows=1, max_pending_workflows=1)
    with pytest.raises(workflow.WorkflowExecutionError):
        workflow.run(fails_once.bind(marks, "f"), workflow_id="failed")
    slow = workflow.run_async(waiting.bind(marks, "a", 1), workflow_id="slow")
    started(marks, "a")
    taken_up = workflow.resume_async("failed")
    until(lambda: workflow.get_status("failed") is workflow.PENDING, "queued resume")
    with pytest.raises(RuntimeError, match="already running or pending"):
        workflow.resume("failed")
    workflow.cancel("failed")
    assert workflow.get_status("failed") is workflow.FAILED
    with pytest.raises(workflow.WorkflowExecutionError):
        ray.get(taken_up)

    taken_up = workflow.resume_async("failed")
    until(lambda: workflow.get_status("failed") is workflow.PENDING, "queued resume")
    kill_driver("slow")
    go(marks)
    assert ray.get([slow, taken_up], timeout=120) == [1, 7]
    assert executions(marks, "f") == 2


def test_another_durability_than_the_hosts_is_refused(tmp_path: Path) -> None:
    folder = str(tmp_path / "queue")
    workflow.init(storage=folder, max_running_workflows=2)
    with pytest.raises(ValueError, match="durability='process'"):
        workflow.init(storage=folder, max_running_workflows=2, durability="power")


@ray.remote(num_cpus=0)
def own_status(workflow_id: str) -> str:
    return str(workflow.get_status(workflow_id).value)


def test_inside_of_a_step_the_storage_is_that_of_its_workflow(tmp_path: Path) -> None:
    workflow.init(storage=str(tmp_path / "somewhere"))
    assert workflow.run(own_status.bind("w"), workflow_id="w") == "RUNNING"


def test_init_refuses_limits_that_make_no_sense_or_differ_from_the_hosts(tmp_path: Path, marks: Path) -> None:
    folder = str(tmp_path / "queue")
    for wrong in (0, -2):
        with pytest.raises(ValueError, match="'max_running_workflows' must be a positive integer"):
            workflow.init(storage=folder, max_running_workflows=wrong)
    with pytest.raises(ValueError, match="'max_pending_workflows' must be a non-negative integer"):
        workflow.init(storage=folder, max_pending_workflows=-2)
    with pytest.raises(TypeError, match="'max_running_workflows' must be None or an integer"):
        workflow.init(storage=folder, max_running_workflows="2")  # type: ignore[arg-type]
    workflow.init(storage=folder, max_running_workflows=2, max_pending_workflows=0)
    workflow.init(storage=folder)
    workflow.init(storage=folder, max_running_workflows=2)
    with pytest.raises(ValueError, match="the init options do not match the original ones"):
        workflow.init(storage=folder, max_running_workflows=3)
    # As if it had not been called.
    assert workflow.run(marked.bind(marks, "after", 1)) == 1
