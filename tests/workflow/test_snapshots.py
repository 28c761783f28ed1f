from __future__ import annotations

import json
from pathlib import Path

import pytest
from _graphs import add, node, output, record, run_graph
from _pieces import Crash, CrashingStore, executions, journal, of_kind

from verl_workflow.errors import ErrorCode, VerlWorkflowError
from verl_workflow.storage import Store
from verl_workflow.workflow import RunStatus, read_run
from verl_workflow.workflow._definition import run_key
from verl_workflow.workflow._graph import Graph
from verl_workflow.workflow._journal import Journal

STEPS = 300


class Counting(Store):
    """Counts the objects that are read."""

    reads = 0

    def get(self, key: str) -> bytes | None:
        self.reads += 1
        return super().get(key)


def prepare(tmp_path: Path) -> tuple[Store, Graph]:
    store = Store(str(tmp_path / "storage"))
    (tmp_path / "marks").mkdir()
    folder = str(tmp_path / "marks")
    root = node(add, folder, "s0", task_id="s0")
    for number in range(1, STEPS):
        root = node(add, folder, f"s{number}", root, task_id=f"s{number}")
    return store, record(store, "r", root)


@pytest.fixture
def left(tmp_path: Path) -> tuple[Store, Graph]:
    """A chain whose driver died after about 250 of its 300 steps."""
    store, graph = prepare(tmp_path)
    with pytest.raises(Crash):
        run_graph(CrashingStore(store.uri, at=255, after=True), "r", graph)
    return store, graph


def test_a_long_run_is_read_from_its_newest_snapshot(left: tuple[Store, Graph]) -> None:
    store, _ = left
    counting = Counting(store.uri)
    state = Journal(counting, run_key(counting, "r")).read()
    assert sum(step.committed is not None for step in state.steps.values()) > 240
    assert counting.reads < 105
    assert len(list(Journal(store, run_key(store, "r")).entries())) > 240


def test_a_run_goes_on_from_a_snapshot_with_nothing_done_twice(left: tuple[Store, Graph], tmp_path: Path) -> None:
    store, graph = left
    assert run_graph(store, "r", graph).status is RunStatus.SUCCEEDED
    assert output(store, "r") == STEPS
    commits = [each["step"] for each in of_kind(journal(store, "r"), "step_succeeded")]
    assert len(commits) == len(set(commits)) == STEPS
    ran = [len(executions(tmp_path / "marks", f"s{number}")) for number in range(STEPS)]
    assert sum(ran) <= STEPS + 1


def test_a_snapshot_says_the_same_as_the_entries_before_it(left: tuple[Store, Graph]) -> None:
    store, _ = left
    from_snapshot = Journal(store, run_key(store, "r")).read()
    for key in store.list(f"{run_key(store, 'r').folder}/snapshots"):
        store.delete(key)
    assert Journal(store, run_key(store, "r")).read() == from_snapshot


@pytest.mark.parametrize(
    "damage", [lambda data: data[:-20], lambda data: b"", lambda data: data.replace(b"s11", b"s99")]
)
def test_a_damaged_snapshot_is_passed_over(left: tuple[Store, Graph], damage: object) -> None:
    store, graph = left
    expected = Journal(store, run_key(store, "r")).read()
    for key in store.list(f"{run_key(store, 'r').folder}/snapshots"):
        store.put(key, damage(store.get(key)))  # type: ignore[operator]
    assert Journal(store, run_key(store, "r")).read() == expected
    assert run_graph(store, "r", graph).status is RunStatus.SUCCEEDED


def test_a_snapshot_of_another_format_is_passed_over(left: tuple[Store, Graph]) -> None:
    store, _ = left
    for key in store.list(f"{run_key(store, 'r').folder}/snapshots"):
        found = json.loads(store.get(key) or b"")
        store.put(key, json.dumps({**found, "format": 2}).encode())
    assert read_run(store, "r").status in {RunStatus.RUNNING, RunStatus.RESUMABLE}


def test_an_entry_that_is_missing_behind_the_snapshot_is_named(left: tuple[Store, Graph]) -> None:
    store, _ = left
    last = store.list(f"{run_key(store, 'r').folder}/journal")[-3]
    store.delete(last)
    with pytest.raises(VerlWorkflowError) as caught:
        read_run(store, "r")
    assert (caught.value.code, caught.value.where) == (ErrorCode.JOURNAL_DAMAGED, last)


def test_only_the_newest_two_snapshots_are_kept(tmp_path: Path) -> None:
    store, graph = prepare(tmp_path)
    run_graph(store, "r", graph)
    assert [key.rsplit("/", 1)[-1] for key in store.list(f"{run_key(store, 'r').folder}/snapshots")] == [
        "000000000200.json",
        "000000000300.json",
    ]
