"""Whoever waits for a workflow is told what has stopped it, soon and whoever asks."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
import ray
from _flows import add, end_hosts, go, hosts, named, refusing_until, started, store, until, waiting

from verl_workflow import workflow
from verl_workflow.errors import ErrorCode, VerlWorkflowError
from verl_workflow.workflow._definition import run_key

pytestmark = pytest.mark.usefixtures("flows")


def test_who_waits_is_told_that_the_storage_is_away_before_it_is_back(tmp_path: Path, marks: Path) -> None:
    workflow.init(storage=str(tmp_path / "disk"))
    told: list[BaseException] = []

    def run() -> None:
        try:
            workflow.run(add.bind(waiting.bind(marks, "w", 1), 1), workflow_id="w")
        except VerlWorkflowError as error:
            told.append(error)

    waiter = threading.Thread(target=run)
    waiter.start()
    started(marks, "w")
    (tmp_path / "disk").rename(tmp_path / "away")
    go(marks)
    waiter.join(60)
    [error] = told
    assert isinstance(error, VerlWorkflowError)
    assert error.code is ErrorCode.STORAGE
    assert not (tmp_path / "disk").exists()
    (tmp_path / "away").rename(tmp_path / "disk")
    until(lambda: workflow.get_status("w") is workflow.RESUMABLE, "end of the driver's lease")
    assert workflow.resume("w") == 2


def test_why_a_driver_stopped_is_told_however_soon_it_did(tmp_path: Path, marks: Path) -> None:
    workflow.init(storage=str(tmp_path / "graphs"))
    with pytest.raises(workflow.WorkflowExecutionError):
        workflow.run(refusing_until.bind(marks, "w", "mended"), workflow_id="w")
    (graph,) = (tmp_path / "graphs" / run_key(store(), "w").folder / "graphs").iterdir()
    graph.write_bytes(b"none")
    for _ in range(10):
        with pytest.raises(VerlWorkflowError, match="not the graph of steps that was recorded"):
            workflow.resume("w")
        with pytest.raises(VerlWorkflowError, match="not the graph of steps that was recorded"):
            ray.get(workflow.resume_async("w"), timeout=60)


def test_outputs_are_given_by_another_host_when_the_first_was_ended_for_good() -> None:
    assert workflow.run(add.options(**named("sum")).bind(1, 2), workflow_id="w") == 3
    for ask in (
        lambda: workflow.get_output_async("w"),
        lambda: workflow.get_output_async("w", task_id="sum"),
        lambda: workflow.run_async(add.bind(1, 2), workflow_id="w"),
    ):
        end_hosts()
        assert ray.get(ask(), timeout=60) == 3
    assert len(hosts()) == 1
