"""Deletion: at whatever point it stops, and whoever wakes up after it, the next run of the id is a new one."""

from __future__ import annotations

import json
import os
import pickle
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from _pieces import Crash, DyingStore, described, executions, journal, of_kind
from _workflows import drive_workflow, record

from verl_workflow import workflow
from verl_workflow.errors import ErrorCode, FencedError
from verl_workflow.storage import Store
from verl_workflow.workflow import RunStatus, _outputs, create_run, current, list_runs, read_run
from verl_workflow.workflow._definition import definition_key, delete_run, run_key
from verl_workflow.workflow._gc import collect, collect_all
from verl_workflow.workflow._graph import StepNode
from verl_workflow.workflow._heartbeat import heartbeat_key
from verl_workflow.workflow._journal import Journal
from verl_workflow.workflow._options import StepOptions
from verl_workflow.workflow._records import Claimed, StepStarted
from verl_workflow.workflow._sent_events import store_event


def marked(folder: str, name: str, *values: int) -> int:
    context = current()
    (Path(folder) / f"{name}.{context.epoch}.{context.attempt}").touch()
    return 1 + sum(values)


BEGUN, RELEASE = threading.Event(), threading.Event()


def waits() -> int:
    BEGUN.set()
    RELEASE.wait(60)
    return 1


def token(*_: Any) -> str:
    return current().idempotency_token


def step(function: Any, *args: Any, name: str) -> StepNode:
    return StepNode(function, args, {}, StepOptions(task_id=name))


def chain(folder: Path) -> StepNode:
    return step(marked, str(folder), "b", step(marked, str(folder), "a", name="a"), name="b")


def of_incarnation(store: Store, run_id: str, incarnation: str) -> list[str]:
    return [key for key in store.list(f"runs/{run_id}") if f"/{incarnation}/" in key]


def deletions_that_stop(store: Store, run_id: str) -> Iterator[None]:
    """Make and delete the run again and again, each time stopped one file later; ends when one was whole."""
    for at in range(1, 100):
        for after in (False, True):
            yield
            try:
                delete_run(DyingStore(store.uri, at=at, after=after), run_id)
            except Crash:
                continue
            assert at > 3
            return
    raise AssertionError("no deletion was whole")


def test_a_deletion_that_stops_anywhere_leaves_the_next_run_alone(store: Store, marks: Path) -> None:
    for number, _ in enumerate(deletions_that_stop(store, "w")):
        if read_or_none(store, "w") is not None:
            # It was stopped before it began.
            delete_run(store, "w")
        folder = marks / str(number)
        folder.mkdir()
        record(store, "w", chain(folder))
        store_event(store, "w", "told", number)
        state = drive_workflow(store, "w")
        assert (state.status, state.steps["b"].value, state.epoch) == (RunStatus.SUCCEEDED, 2, 1)
        assert executions(folder, "a") == executions(folder, "b") == [(1, 1)]
        assert len(of_kind(journal(store, "w"), "claimed")) == 1


def read_or_none(store: Store, run_id: str) -> Any:
    return next((state for state in list_runs(store) if state.run_id == run_id), None)


class Overtaken(Store):
    """After its n-th deletion, another run takes the id and comes to its end."""

    def __init__(self, uri: str, at: int, marks: Path) -> None:
        super().__init__(uri)
        self.left, self._marks = at, marks
        self.kept: list[str] = []

    def delete(self, key: str) -> None:
        super().delete(key)
        self.left -= 1
        if self.left == 0:
            record(self, "w", chain(self._marks))
            drive_workflow(Store(self.uri), "w")
            self.kept = sorted([definition_key("w"), *self.list(run_key(self, "w").folder)])


def test_a_slow_deletion_takes_nothing_from_the_next_run(store: Store, marks: Path) -> None:
    """The next one comes between any two of its steps, and has ended before it goes on."""
    record(store, "w", chain(marks))
    drive_workflow(store, "w")
    deletions = len(store.list("runs/w"))
    for at in range(1, deletions + 1):
        overtaken = Overtaken(store.uri, at, marks)
        delete_run(overtaken, "w")
        assert overtaken.kept
        assert store.list("runs/w") == overtaken.kept
        state = read_run(store, "w")
        assert (state.status, state.steps["b"].value) == (RunStatus.SUCCEEDED, 2)


def test_an_event_for_a_deleted_workflow_is_not_given_to_the_next(store: Store) -> None:
    record(store, "w", step(token, name="a"))
    store_event(store, "w", "go", "to the first")
    with pytest.raises(Crash):
        delete_run(DyingStore(store.uri, at=1, after=True), "w")
    record(store, "w", step(token, name="a"))
    assert store_event(store, "w", "go", "to the second")


def test_a_driver_that_has_slept_through_a_deletion_is_fenced(
    store: Store, marks: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("verl_workflow.workflow._journal._LOOK_AGAIN_S", -1.0)
    sleeper = Journal(store, create_run(store, "w", {}))
    assert sleeper.claim(Claimed(owner={}, steps=[]))
    delete_run(store, "w")
    for late in (lambda: sleeper.append(StepStarted(step="a", attempt=1)), sleeper.poll):
        with pytest.raises(FencedError, match="deleted"):
            late()

    sleeper = Journal(store, create_run(store, "w", {}))
    assert sleeper.claim(Claimed(owner={}, steps=[]))
    delete_run(store, "w")
    record(store, "w", chain(marks))
    for late in (lambda: sleeper.append(StepStarted(step="a", attempt=1)), sleeper.poll):
        with pytest.raises(FencedError, match="deleted"):
            late()
    state = drive_workflow(store, "w")
    assert (state.status, state.epoch, state.steps["b"].value) == (RunStatus.SUCCEEDED, 1, 2)
    assert executions(marks, "a") == [(1, 1)]


def test_a_driver_at_work_stops_when_its_run_is_deleted(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("verl_workflow.workflow._journal._LOOK_AGAIN_S", 0.05)
    record(store, "w", step(waits, name="a"))
    stopped: list[BaseException] = []

    def drives() -> None:
        try:
            drive_workflow(store, "w")
        except FencedError as error:
            stopped.append(error)

    thread = threading.Thread(target=drives)
    thread.start()
    assert BEGUN.wait(60)
    delete_run(store, "w")
    thread.join(60)
    RELEASE.set()
    assert [error.code for error in stopped] == [ErrorCode.FENCED]
    assert list_runs(store) == []


def test_who_deletes_one_run_takes_nothing_from_the_next(store: Store, marks: Path) -> None:
    record(store, "w", chain(marks))
    first = run_key(store, "w")
    delete_run(store, "w", first.incarnation)
    record(store, "w", chain(marks))
    delete_run(store, "w", first.incarnation)
    assert drive_workflow(store, "w").status is RunStatus.SUCCEEDED
    with pytest.raises(FencedError, match="deleted"):
        drive_workflow(store, "w", run=first)


def test_tokens_are_not_those_of_a_deleted_workflow(store: Store) -> None:
    found = set()
    for _ in range(2):
        record(store, "w", step(token, name="a"))
        found.add(drive_workflow(store, "w").steps["a"].value)
        delete_run(store, "w")
    assert len(found) == 2


def test_delete_watches_a_driver_whose_clock_is_wrong(store: Store) -> None:
    """An hour behind, it looks interrupted by the clock; its heart is seen to beat."""
    key = create_run(store, "w", described("a"))
    owner = {"host": "elsewhere", "pid": 1, "id": "x"}
    assert Journal(store, key).claim(Claimed(owner=owner, steps=["a"]))
    seq = store.list(f"{key.folder}/journal")[0]
    claimed = json.loads(store.get(seq) or b"")
    store.put(seq, json.dumps({**claimed, "time": time.time() - 3600}).encode())
    beating = threading.Event()

    def beats() -> None:
        for number in range(1000):
            if beating.is_set():
                return
            beat = {"epoch": 1, "n": number, "time": time.time() - 3600, "released": False, "owner": owner}
            store.put(heartbeat_key(key), json.dumps(beat).encode())
            time.sleep(0.05)

    thread = threading.Thread(target=beats)
    thread.start()
    try:
        workflow.init(storage=store.uri)
        assert workflow.get_status("w") == workflow.RESUMABLE
        with pytest.raises(workflow.WorkflowStillActiveError):
            workflow.delete("w")
    finally:
        beating.set()
        thread.join()
    assert read_run(store, "w").status is RunStatus.RESUMABLE


def test_gc_takes_what_an_interrupted_deletion_has_left(store: Store, marks: Path) -> None:
    for run_id in ("again", "never"):
        record(store, run_id, chain(marks))
        drive_workflow(store, run_id)
    old = run_key(store, "again").incarnation
    for run_id in ("again", "never"):
        with pytest.raises(Crash):
            delete_run(DyingStore(store.uri, at=1, after=True), run_id)
    record(store, "again", chain(marks))
    drive_workflow(store, "again")
    left = of_incarnation(store, "again", old)
    assert left
    assert collect(store, "again").remains == 0
    assert collect(store, "again", stale_after_s=0).remains == len(left)
    assert of_incarnation(store, "again", old) == []
    assert read_run(store, "again").steps["b"].value == 2

    # Nobody knows whether a run is being made of it.
    remains = store.list("runs/never")
    assert collect_all(store).remains == 0
    assert store.list("runs/never") == remains
    for key in remains:
        assert store.local_path is not None
        os.utime(store.local_path / key, (time.time() - 7200,) * 2)
    assert collect_all(store).remains == len(remains)
    assert store.folders("runs") == ["again"]


def test_what_a_dead_writer_has_left_goes_with_its_run_or_after_an_hour(store: Store, marks: Path) -> None:
    record(store, "w", chain(marks))
    drive_workflow(store, "w")
    assert store.local_path is not None
    values = store.local_path / run_key(store, "w").folder / "values"
    values.mkdir(exist_ok=True)
    left = values / "big-1-1.pkl#1"
    left.write_bytes(b"half a value")
    assert collect(store, "w").unfinished == 0
    assert left.exists()
    swept = collect(store, "w", stale_after_s=0)
    assert (swept.unfinished, left.exists()) == (1, False)
    assert swept.bytes >= len(b"half a value")

    left.write_bytes(b"half a value")
    # Somebody is just recording the next run of this id.
    other = store.local_path / "runs" / "w" / "0123456789abcdef" / "graphs" / "g.pkl#1"
    other.parent.mkdir(parents=True)
    other.touch()
    delete_run(store, "w", run_key(store, "w").incarnation)
    assert (left.exists(), other.exists()) == (False, True)
    os.utime(other, (time.time() - 7200,) * 2)
    assert collect_all(store).unfinished == 1
    assert store.folders("runs") == []


def test_who_waits_for_a_deleted_run_is_not_given_what_the_next_one_yields(store: Store) -> None:
    record(store, "w", step(large, "first", name="s"))
    drive_workflow(store, "w")
    run = run_key(store, "w")
    read = _outputs._Look(store, run, None)()
    assert read is not None
    delivered = pickle.dumps(_outputs.Delivered(store, run, *read))
    delete_run(store, "w", run.incarnation)
    for again in (False, True):
        if again:
            record(store, "w", step(large, "second", name="s"))
            drive_workflow(store, "w")
        with pytest.raises(workflow.WorkflowNotFoundError):
            _outputs.await_output(store, run, None)
        with pytest.raises(workflow.WorkflowNotFoundError):
            pickle.loads(delivered)
    assert _outputs.await_output(store, run_key(store, "w"), None) == "second" * 1000


def large(word: str) -> str:
    return word * 1000
