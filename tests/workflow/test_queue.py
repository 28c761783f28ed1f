"""What a host takes and refuses, when several ask at once and when it dies in between."""

from __future__ import annotations

import logging
import os
import queue
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import ray
from _flows import add, executions, go, mark, marked, named, refusing_until, started, store, until, waiting

from verl_workflow import workflow
from verl_workflow.errors import ErrorCode, VerlWorkflowError
from verl_workflow.storage import Store
from verl_workflow.workflow import Driver, InlineLauncher, _session, create_run
from verl_workflow.workflow._client import Client
from verl_workflow.workflow._dag import DagView, is_node
from verl_workflow.workflow._definition import delete_run, run_exists, run_key
from verl_workflow.workflow._graph import Names, graph_of
from verl_workflow.workflow._journal import Journal
from verl_workflow.workflow._names import RunKey
from verl_workflow.workflow._node import save_graph
from verl_workflow.workflow._records import Claimed, RunFailed
from verl_workflow.workflow._state import read_graph

pytestmark = pytest.mark.usefixtures("flows")


class WatchedStore(Store):
    """A storage that leaves marks of what a host does with it. Args: marks: a folder."""

    def __init__(self, uri: str, marks: Path) -> None:
        super().__init__(uri)
        self._marks = marks

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.uri, self._marks)


class HoldingStore(WatchedStore):
    """Holds the records of new workflows back until the test says ``go``."""

    def create(self, key: str, data: bytes) -> bool:
        if key.endswith("/definition.json") and "/held-" in key:
            mark(self._marks, "held")
            while not (self._marks / "go").exists():
                time.sleep(0.02)
        return super().create(key, data)


class DyingBeforeRecording(WatchedStore):
    """Ends its process before the first record of a workflow is written."""

    def create(self, key: str, data: bytes) -> bool:
        if key.endswith("/definition.json") and mark(self._marks, "record") == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().create(key, data)


class DyingAfterRecording(WatchedStore):
    """Ends its process when the first record of a workflow is written, and nobody has been told so."""

    def create(self, key: str, data: bytes) -> bool:
        done = super().create(key, data)
        if key.endswith("/definition.json") and mark(self._marks, "record") == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return done


class TroubledStore(WatchedStore):
    """Cannot be asked whose turn it is while the test leaves ``trouble`` there."""

    def get(self, key: str) -> bytes | None:
        if key.endswith("/turn.json") and (self._marks / "trouble").exists():
            mark(self._marks, "refused")
            raise VerlWorkflowError(ErrorCode.STORAGE, "the storage is away", retryable=True)
        return super().get(key)


class LosingAnAnswer(WatchedStore):
    """Keeps the first record of a workflow named ``doubtful``, and says that it failed."""

    def create(self, key: str, data: bytes) -> bool:
        done = super().create(key, data)
        if key.endswith("/doubtful/definition.json") and mark(self._marks, "lost") == 1:
            raise VerlWorkflowError(ErrorCode.STORAGE, "no answer", retryable=True)
        return done


class Spoiling(WatchedStore):
    """Keeps half of the first record of a workflow named ``spoilt``, and says that it failed."""

    def create(self, key: str, data: bytes) -> bool:
        if not key.endswith("/spoilt/definition.json"):
            return super().create(key, data)
        super().create(key, data[: len(data) // 2])
        raise VerlWorkflowError(ErrorCode.STORAGE, "no answer", retryable=True)


class HoldingClaims(WatchedStore):
    """Lets nobody take a workflow while the test leaves ``hold`` there."""

    def create(self, key: str, data: bytes) -> bool:
        while "/journal/" in key and (self._marks / "hold").exists():
            mark(self._marks, "held")
            time.sleep(0.1)
        return super().create(key, data)


@pytest.fixture
def limited(tmp_path: Path) -> Callable[..., Store]:
    """Begins a host of its own, with limits, on a storage of this kind."""

    def begin(running: int, pending: int, kind: Any = Store, *args: Any) -> Store:
        client = Client(kind(str(tmp_path / "queue"), *args), running, pending)
        _session.use(client)
        client.host()
        return client.store

    return begin


def definition_of(dag: Any) -> dict[str, Any]:
    """What is recorded of a workflow; its graph lies in a folder that belongs to none."""
    graph = graph_of(dag, DagView(), store(), "graphs/objects", is_node=is_node)
    saved = save_graph(graph, store(), "graphs")
    root = Names().give(saved.names)[-1]
    return {"workflow": {"graph": saved.graph_key, "sha256": saved.sha256, "root": root, "metadata": {}}}


def begin(key: RunKey, definition: dict[str, Any]) -> None:
    _session.ask("begin", key, definition, _session.client().caller())


def fail(marks: Path, name: str, value: Any = None) -> None:
    """A workflow of this name that fails, until there is a mark ``mended``."""
    with pytest.raises(workflow.WorkflowExecutionError):
        workflow.run(refusing_until.options(num_cpus=0).bind(marks, name, "mended", value), workflow_id=name)


def occupy(marks: Path, name: str = "slow") -> Any:
    """A workflow that runs until the test says ``go``."""
    ref = workflow.run_async(waiting.bind(marks, name, name), workflow_id=name)
    started(marks, name)
    return ref


# Calls whose answer is lost


def test_a_workflow_that_a_call_has_recorded_is_driven_when_that_call_comes_again(marks: Path) -> None:
    definition = definition_of(marked.bind(marks, "a", 1))
    host = _session.client().host()
    # What is there when the storage has written the record and its answer was lost.
    key = create_run(store(), "w", definition, host=_session.client().token, seed=[])
    with pytest.raises(RuntimeError, match="Workflow 'w' is already running or pending"):
        begin(RunKey.new("w"), definition)
    begin(key, definition)
    until(lambda: workflow.get_status("w") is workflow.SUCCESSFUL, "end of the workflow")
    assert workflow.get_output("w") == 1
    assert ray.get(host.wait.remote("w")) is None


def test_a_call_that_comes_again_is_accepted_and_nothing_runs_twice(marks: Path) -> None:
    definition = definition_of(waiting.bind(marks, "a", 1))
    key = RunKey.new("w")
    for _ in range(3):
        begin(key, definition)
    started(marks, "a")
    begin(key, definition)
    with pytest.raises(RuntimeError, match="Workflow 'w' is already running or pending"):
        begin(RunKey.new("w"), definition)
    go(marks)
    assert _session.deliver(_session.Asked(run=run_key(store(), "w"))) == 1
    begin(key, definition)
    assert _session.deliver(_session.Asked(run=run_key(store(), "w"))) == 1
    assert executions(marks, "a") == 1


@pytest.mark.fault
@pytest.mark.parametrize("kind", [DyingBeforeRecording, DyingAfterRecording])
def test_a_host_that_dies_while_it_records_a_workflow_has_begun_it_once(limited: Any, marks: Path, kind: Any) -> None:
    limited(1, 0, kind, marks)
    ref = workflow.run_async(waiting.bind(marks, "a", 1), workflow_id="w")
    started(marks, "a")
    with pytest.raises(queue.Full):
        workflow.run(add.bind(1, 2), workflow_id="other")
    go(marks)
    assert ray.get(ref) == 1
    assert executions(marks, "record") > 0
    assert executions(marks, "a") == 1


def test_while_one_that_was_deleted_is_still_driven_none_of_its_id_is_recorded(marks: Path) -> None:
    workflow.run_async(waiting.bind(marks, "first", 1), workflow_id="w")
    started(marks, "first")
    # As whoever takes it for interrupted, by a clock that is wrong.
    delete_run(store(), "w")
    with pytest.raises(RuntimeError, match="Workflow 'w' is already running or pending"):
        workflow.run(marked.bind(marks, "second", 2), workflow_id="w")
    assert not run_exists(store(), "w")
    go(marks)
    until(lambda: begun_and_ended(marks), "end of the second one")


def begun_and_ended(marks: Path) -> bool:
    try:
        return bool(workflow.run(marked.bind(marks, "second", 2), workflow_id="w") == 2)
    except RuntimeError:
        return False


def test_a_workflow_whose_record_was_kept_though_the_storage_failed_is_driven(limited: Any, marks: Path) -> None:
    limited(-1, -1, LosingAnAnswer, marks)
    with pytest.raises(VerlWorkflowError, match="no answer"):
        workflow.run(marked.bind(marks, "a", 7), workflow_id="doubtful")
    until(lambda: workflow.get_status("doubtful") is workflow.SUCCESSFUL, "end of it")
    assert workflow.get_output("doubtful") == 7
    assert executions(marks, "a") == 1


def test_a_workflow_whose_record_was_spoilt_as_the_storage_failed_holds_no_place(limited: Any, marks: Path) -> None:
    limited(1, 0, Spoiling, marks)
    with pytest.raises(VerlWorkflowError, match="no answer"):
        workflow.run(add.bind(1, 2), workflow_id="spoilt")

    def another() -> bool:
        try:
            return bool(workflow.run(marked.bind(marks, "b", 3), workflow_id="another") == 3)
        except queue.Full:
            return False

    until(another, "free place")
    assert dict(workflow.list_all()) == {"another": workflow.SUCCESSFUL, "spoilt": workflow.DAMAGED}
    assert executions(marks, "b") == 1


def test_whoever_asks_after_a_resume_is_not_told_of_the_failure_before(limited: Any, marks: Path) -> None:
    limited(-1, -1, HoldingClaims, marks)
    fail(marks, "w", 7)
    (marks / "mended").touch()
    (marks / "hold").touch()
    ref = workflow.resume_async("w")
    started(marks, "held")
    assert workflow.get_status("w") is workflow.PENDING
    with pytest.raises(workflow.WorkflowStillActiveError):
        workflow.delete("w")
    got: list[Any] = []
    waiter = threading.Thread(target=lambda: got.append(workflow.get_output("w")))
    waiter.start()
    (marks / "hold").unlink()
    waiter.join(60)
    assert (ray.get(ref), got) == (7, [7])


# A full queue


def test_nothing_is_left_of_what_a_full_queue_refuses(limited: Any, marks: Path) -> None:
    kept = limited(1, 0)
    workflow.run(add.options(**named("sum")).bind(ray.put(1), 2), workflow_id="done")
    slow = occupy(marks)
    before = kept.list("runs/done")
    with pytest.raises(queue.Full, match="Workflow queue has been full"):
        workflow.run_async(add.bind(ray.put(1), 2), workflow_id="refused")
    with pytest.raises(queue.Full, match="Workflow queue has been full"):
        workflow.fork_async("done", "sum", new_workflow_id="fork")
    assert kept.list("runs/refused") == kept.list("runs/fork") == []
    assert kept.list("runs/done") == before
    go(marks)
    assert ray.get(slow) == "slow"


def test_workflows_that_begin_at_once_do_not_go_over_the_limits(limited: Any, marks: Path) -> None:
    kept = limited(1, 1, HoldingStore, marks)
    fail(marks, "failed")
    client = _session.client()
    definition = definition_of(marked.bind(marks, "a", 1))
    begun = {
        client.host().begin.remote(RunKey.new(f"held-{n}"), definition, client.caller()): f"held-{n}" for n in range(6)
    }
    refused, taken = ray.wait(list(begun), num_returns=4, timeout=60)
    for ref in refused:
        with pytest.raises(queue.Full):
            ray.get(ref)
        assert kept.list(f"runs/{begun[ref]}") == []
    # Nor does one that is taken up get a place that is promised already.
    with pytest.raises(queue.Full):
        workflow.resume_async("failed")
    assert workflow.get_status("failed") is workflow.FAILED
    assert (executions(marks, "held"), len(taken)) == (2, 2)
    go(marks)
    ray.get(taken)
    assert [_session.deliver(_session.Asked(run=run_key(kept, begun[ref]))) for ref in taken] == [1, 1]


def test_resume_all_takes_up_what_the_queue_takes_and_logs_the_rest(
    limited: Any, marks: Path, caplog: pytest.LogCaptureFixture
) -> None:
    limited(1, 2)
    for name in ("f1", "f2", "f3", "f4"):
        fail(marks, name, name)
    (marks / "mended").touch()
    slow = occupy(marks)
    with caplog.at_level(logging.WARNING, "verl_workflow"):
        found = dict(workflow.resume_all(include_failed=True))
    assert list(found) == ["f1", "f2"]
    told = [record.getMessage() for record in caplog.records]
    assert [line for line in told if "not resumed" in line] == [
        f"workflow {name} is not resumed: Workflow queue has been full" for name in ("f3", "f4")
    ]
    assert {workflow.get_status(name) for name in ("f3", "f4")} == {workflow.FAILED}
    go(marks)
    assert ray.get([slow, *found.values()]) == ["slow", "f1", "f2"]
    assert [executions(marks, name) for name in ("f1", "f2", "f3", "f4")] == [2, 2, 1, 1]


# Those who wait in it


def test_a_queued_workflow_that_has_ended_elsewhere_is_not_run_and_its_waiters_get_the_value(
    limited: Any, marks: Path
) -> None:
    kept = limited(1, 2)
    fail(marks, "w", 7)
    (marks / "mended").touch()
    slow = occupy(marks)
    taken_up = workflow.resume_async("w")
    got: list[Any] = []
    waiter = threading.Thread(target=lambda: got.append(_session.deliver(_session.Asked(run=run_key(store(), "w")))))
    waiter.start()
    assert workflow.get_status("w") is workflow.PENDING
    recorded = workflow.read_run(kept, "w").definition["workflow"]
    elsewhere = Driver(kept, "w", read_graph(kept, recorded["graph"], recorded["sha256"]), InlineLauncher()).run()
    assert elsewhere.status.value == "succeeded"
    go(marks)
    assert ray.get([slow, taken_up]) == ["slow", 7]
    waiter.join(60)
    assert got == [7]
    assert executions(marks, "w") == 2
    assert workflow.read_run(kept, "w").epoch == elsewhere.epoch


def test_another_run_of_the_id_of_one_that_waits_is_not_driven_in_its_place(limited: Any, marks: Path) -> None:
    kept = limited(1, 1)
    slow = occupy(marks)
    workflow.run_async(marked.bind(marks, "a", 1), workflow_id="w")
    assert workflow.get_status("w") is workflow.PENDING
    # By somebody on another cluster, where the next one fails.
    definition = workflow.read_run(kept, "w").definition
    delete_run(kept, "w")
    create_run(kept, "w", definition)
    claimed = Journal(kept, run_key(kept, "w"))
    assert claimed.claim(Claimed(owner={"host": "elsewhere", "pid": 1, "id": "x"}, steps=[]))
    claimed.append(RunFailed(error={"code": "step_failed", "what": "there", "step": "a"}))
    go(marks)
    assert ray.get(slow) == "slow"
    assert workflow.run(add.bind(1, 2), workflow_id="behind") == 3
    assert (workflow.get_status("w"), workflow.read_run(kept, "w").epoch) == (workflow.FAILED, 1)
    assert executions(marks, "a") == 0


def test_a_storage_that_is_away_when_a_turn_has_come_loses_neither_the_workflow_nor_its_place(
    limited: Any, marks: Path
) -> None:
    limited(1, 1, TroubledStore, marks)
    fail(marks, "w", 7)
    (marks / "mended").touch()
    slow = occupy(marks)
    taken_up = workflow.resume_async("w")
    (marks / "trouble").touch()
    go(marks)
    assert ray.get(slow) == "slow"
    started(marks, "refused")
    (marks / "trouble").unlink()
    assert ray.get(taken_up, timeout=60) == 7
    assert workflow.run(add.bind(1, 2)) == 3
