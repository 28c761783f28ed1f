"""gc: what is left says the same, whenever it was stopped; what is needed stays."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from _pieces import Crash, DyingStore, Marking, diamond, drive, executions, journal
from _workflows import drive_workflow, record

from verl_workflow import workflow
from verl_workflow.errors import ErrorCode, FencedError, VerlWorkflowError
from verl_workflow.storage import Store
from verl_workflow.workflow import (
    Plan,
    RetryPolicy,
    RunStatus,
    Step,
    StepContext,
    create_run,
    list_runs,
    read_run,
    request_cancel,
    this_process,
)
from verl_workflow.workflow._definition import run_key
from verl_workflow.workflow._gc import Collected, collect, collect_all
from verl_workflow.workflow._graph import StepNode
from verl_workflow.workflow._journal import Journal
from verl_workflow.workflow._options import StepOptions
from verl_workflow.workflow._pickling import dumps
from verl_workflow.workflow._records import Claimed, StepStarted

BIG = 5000


def node(function: Callable[..., Any], *args: Any, name: str, **options: Any) -> StepNode:
    return StepNode(function, args, {}, StepOptions(task_id=name, **options))


def big(mark: str) -> str:
    return mark * BIG


def goes_on(text: str) -> Any:
    return node(lambda found: found + "!" * BIG, text, name="inner")


def pair(first: str, second: str) -> list[int]:
    return [len(first), len(second)]


def make_workflow(store: Store, run_id: str = "w") -> None:
    """first -> second (continues to inner) -> last, with litter of attempts that nobody knows of."""
    first = node(big, "a", name="first", metadata={"color": "red"})
    second = node(goes_on, first, name="second")
    record(store, run_id, node(pair, first, second, name="last"), owner="me")


def litter(store: Store, run_id: str = "w") -> None:
    for part, name in (("values", "first-1-9.pkl"), ("graphs", "0" * 64 + ".pkl"), ("objects", "1" * 64 + ".pkl")):
        store.put(f"{run_key(store, run_id).folder}/{part}/{name}", b"left by an attempt that died")
    store.put(f"{run_key(store, run_id).folder}/progress/nobody.json", b'{"attempt": 1, "facts": {}}')


def facts(store: Store, run_id: str = "w") -> Any:
    """All that anybody is told of a run, values included; but for the heartbeat's age."""
    state = read_run(store, run_id)
    told = {name: value for name, value in vars(state).items() if name not in {"steps", "heartbeat_age_s"}}
    steps = {name: (step, step.value if step.kept else None, step.progress) for name, step in state.steps.items()}
    metadata = {}
    if "workflow" in state.definition:
        workflow.init(storage=store.uri)
        metadata = {name: workflow.get_metadata(run_id, name) for name in state.steps}
        metadata[""] = workflow.get_metadata(run_id)
    return told, steps, metadata


def test_what_is_left_of_an_ended_workflow_says_the_same(store: Store) -> None:
    make_workflow(store)
    drive_workflow(store, "w")
    litter(store)
    before, size = facts(store), sum(len(store.get(key) or b"") for key in store.list("runs/w"))
    number = len(store.list(f"{run_key(store, 'w').folder}/journal"))
    removed = collect(store, "w", stale_after_s=0)
    assert facts(store) == before
    counts = removed.to_json()
    assert {name: counts[name] for name in ("runs", "entries", "values", "graphs", "objects", "progress")} == {
        "runs": 1,
        "entries": number - 1,
        "values": 1,
        "graphs": 1,
        "objects": 1,
        "progress": 1,
    }
    snapshot = f"{run_key(store, 'w').folder}/snapshots/{number:012}.json"
    assert store.list(f"{run_key(store, 'w').folder}/snapshots") == [snapshot]
    left = sum(len(store.get(key) or b"") for key in store.list("runs/w"))
    assert removed.bytes == size + len(store.get(snapshot) or b"") - left
    again = collect(store, "w", stale_after_s=0)
    assert again == Collected(runs=1)
    workflow.init(storage=store.uri)
    assert workflow.get_output("w") == [BIG, 2 * BIG]
    assert workflow.get_output("w", task_id="second") == "a" * BIG + "!" * BIG


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
def test_it_may_die_at_any_deletion(tmp_path: Path, after: bool) -> None:
    at = 0
    while True:
        at += 1
        store = Store(str(tmp_path / f"{at}"))
        make_workflow(store)
        drive_workflow(store, "w")
        litter(store)
        before = facts(store)
        try:
            collect(DyingStore(store.uri, at=at, after=after), "w", stale_after_s=0)
        except Crash:
            assert facts(store) == before
            collect(store, "w", stale_after_s=0)
            assert facts(store) == before
            assert len(store.list(f"{run_key(store, 'w').folder}/journal")) == 1
        else:
            break
    assert at > 8


def test_a_pipelines_run_keeps_what_it_shows(store: Store, marks: Path) -> None:
    create_run(store, "r", {"pipeline": {"name": "demo", "stages": []}})

    def reports(context: StepContext) -> dict[str, int]:
        context.report({"step": 3, "total": 4})
        return {"rows": 1}

    step = Step(name="a", call=reports)
    drive(store, "r", Plan(steps=(step, Step(name="b", call=Marking(marks), after=()))))
    before = facts(store, "r")
    assert before[1]["a"][2] == {"step": 3, "total": 4}
    assert collect(store, "r", stale_after_s=0).entries > 0
    assert facts(store, "r") == before


def test_only_what_ended_an_hour_ago_is_cleared_away(store: Store) -> None:
    make_workflow(store)
    drive_workflow(store, "w")
    entries = store.list(f"{run_key(store, 'w').folder}/journal")
    assert collect(store, "w") == Collected(runs=1)
    # Superseded snapshots are of no use to anybody.
    for number in (1, 2):
        part = Journal(store, run_key(store, "w"))
        for entry in list(part.entries())[:number]:
            part._take(entry)
        part.snapshot()
    removed = collect(store, "w")
    assert (removed.snapshots, removed.entries, removed.values) == (1, 0, 0)
    assert store.list(f"{run_key(store, 'w').folder}/journal") == entries
    assert store.list(f"{run_key(store, 'w').folder}/snapshots") == [
        f"{run_key(store, 'w').folder}/snapshots/000000000002.json"
    ]
    assert read_run(store, "w").status is RunStatus.SUCCEEDED
    # All times of the record were an hour and a bit ago.
    for key in entries:
        entry = json.loads(store.get(key) or b"")
        store.put(key, json.dumps({**entry, "time": entry["time"] - 3700}).encode())
    store.delete(f"{run_key(store, 'w').folder}/snapshots/000000000002.json")
    assert collect(store, "w").entries == len(entries) - 1


def test_what_nobody_has_ended_keeps_its_journal(store: Store, marks: Path) -> None:
    make_workflow(store)
    driver = Journal(store, run_key(store, "w"))
    driver.read()
    assert driver.claim(Claimed(owner=this_process(), steps=["first", "second", "last"]))
    driver.append(StepStarted(step="first", attempt=1))
    litter(store)
    before = store.list("runs/w")
    assert collect(store, "w", stale_after_s=0) == Collected(runs=1)
    assert store.list("runs/w") == before


def test_a_failed_run_is_resumed_after_it(store: Store, marks: Path, tmp_path: Path) -> None:
    mended = tmp_path / "mended"

    def last(context: StepContext) -> int:
        found = context.last_heartbeat
        context.report({"step": (found or {}).get("step", 0) + 1})
        if not mended.exists():
            raise RuntimeError("not yet")
        return int((found or {})["step"])

    plan = Plan(
        steps=(
            Step(name="a", call=Marking(marks)),
            Step(name="b", call=last, after=("a",), retry=RetryPolicy(attempts=1)),
        )
    )
    create_run(store, "r", {})
    assert drive(store, "r", plan).status is RunStatus.FAILED
    before = facts(store, "r")
    removed = collect(store, "r", stale_after_s=0)
    assert (removed.entries > 0, removed.progress) == (True, 0)
    assert facts(store, "r") == before
    mended.touch()
    state = drive(store, "r", plan)
    assert state.status is RunStatus.SUCCEEDED, state.error
    assert state.steps["b"].value == 1
    assert executions(marks, "a") == [(1, 1)]


def test_a_cancelled_run_stays_cancelled(store: Store, marks: Path) -> None:
    create_run(store, "r", {})
    request_cancel(store, "r")
    assert collect(store, "r", stale_after_s=0).entries == 2
    assert read_run(store, "r").status is RunStatus.CANCELLED
    with pytest.raises(VerlWorkflowError) as caught:
        drive(store, "r", diamond(marks))
    assert caught.value.code is ErrorCode.RUN_TERMINAL


@pytest.mark.parametrize("torn", [b"{", None], ids=["torn", "gone"])
def test_a_journal_without_its_snapshot_is_damaged_not_new(store: Store, torn: bytes | None) -> None:
    make_workflow(store)
    drive_workflow(store, "w")
    collect(store, "w", stale_after_s=0)
    (snapshot,) = store.list(f"{run_key(store, 'w').folder}/snapshots")
    (entry,) = store.list(f"{run_key(store, 'w').folder}/journal")
    if torn is None:
        store.delete(snapshot)
    else:
        store.put(snapshot, torn)

    def assert_damaged() -> None:
        with pytest.raises(VerlWorkflowError, match="missing") as caught:
            read_run(store, "w")
        assert caught.value.code is ErrorCode.JOURNAL_DAMAGED
        assert [state.status for state in list_runs(store)] == [RunStatus.DAMAGED]

    assert_damaged()
    if torn is not None:
        store.delete(entry)
        assert_damaged()


def test_a_torn_snapshot_of_the_same_number_is_written_anew_first(store: Store) -> None:
    make_workflow(store)
    drive_workflow(store, "w")
    number = len(store.list(f"{run_key(store, 'w').folder}/journal"))
    before = facts(store)
    store.put(f"{run_key(store, 'w').folder}/snapshots/{number:012}.json", b"{")
    collect(store, "w", stale_after_s=0)
    assert facts(store) == before


def test_a_damaged_run_is_left_alone_and_keeps_no_other(store: Store) -> None:
    for run_id in ("good", "torn"):
        make_workflow(store, run_id)
        drive_workflow(store, run_id)
    key = store.list(f"{run_key(store, 'torn').folder}/journal")[2]
    store.put(key, b"{")
    before = store.list("runs/torn")
    removed = collect_all(store, stale_after_s=0)
    assert (removed.runs, removed.damaged, store.list("runs/torn")) == (2, ["torn"], before)
    assert len(store.list(f"{run_key(store, 'good').folder}/journal")) == 1


def test_what_slept_since_before_the_end_writes_into_no_hole(store: Store, marks: Path) -> None:
    create_run(store, "r", {})
    sleepy, asking = Journal(store, run_key(store, "r")), Journal(store, run_key(store, "r"))
    sleepy.read()
    asking.read()
    drive(store, "r", diamond(marks))
    collect(store, "r", stale_after_s=0)
    before = facts(store, "r")
    with pytest.raises(FencedError):
        sleepy.claim(Claimed(owner=this_process(), steps=["a"]))
    assert facts(store, "r") == before
    assert len(store.list(f"{run_key(store, 'r').folder}/journal")) == 1


def test_a_reader_that_is_overtaken_goes_on_from_the_snapshot(store: Store) -> None:
    make_workflow(store)
    drive_workflow(store, "w")
    before = read_run(store, "w")
    overtaken: list[str] = []

    class Slow(Store):
        def get(self, key: str) -> bytes | None:
            if key.endswith("journal/000000000002.json") and not overtaken:
                overtaken.append(key)
                collect(store, "w", stale_after_s=0)
            return super().get(key)

    slow = Journal(Slow(store.uri), run_key(Slow(store.uri), "w"))
    assert slow.read().status is before.status
    assert overtaken
    assert slow.state.ended_at == before.ended_at


def test_objects_that_results_refer_to_stay(store: Store, ray_cluster: Any) -> None:
    def refers() -> Any:
        import ray

        return {"deep": [ray.put({"inner": ray.put("x" * BIG)})]}

    record(store, "w", node(refers, name="refers"))
    drive_workflow(store, "w")
    kept = store.list(f"{run_key(store, 'w').folder}/objects")
    assert len(kept) == 2
    lost = ray_cluster.put("of an attempt that died")
    dumps(lost, store, f"{run_key(store, 'w').folder}/objects")
    assert collect(store, "w", stale_after_s=0).objects == 1
    assert store.list(f"{run_key(store, 'w').folder}/objects") == kept
    workflow.init(storage=store.uri)
    deep = ray_cluster.get(workflow.get_output("w")["deep"][0])
    assert ray_cluster.get(deep["inner"]) == "x" * BIG


def test_the_api_names_an_unknown_workflow(store: Store) -> None:
    workflow.init(storage=store.uri)
    with pytest.raises(workflow.WorkflowNotFoundError):
        workflow.gc("nope")
    assert workflow.gc() == Collected()
    make_workflow(store)
    assert workflow.gc("w") == Collected(runs=1)
    assert journal(store, "w") == []
