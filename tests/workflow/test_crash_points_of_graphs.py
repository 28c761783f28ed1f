"""Kill the driver before and after every single storage write of a workflow, take it up again, and look at it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from _graphs import GRAPHS, mark, node, output, record, run_graph
from _pieces import Crash, CrashingStore, executions, journal, of_kind
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from verl_workflow.storage import Store
from verl_workflow.workflow import RunStatus, read_run, request_cancel
from verl_workflow.workflow._graph import Graph

NEVER = 1_000_000
UNKEPT = {"u0", "u1"}


def prepare(folder: Path, kind: str) -> tuple[Store, Graph]:
    (folder / "marks").mkdir(parents=True)
    store = Store(str(folder / "storage"))
    return store, record(store, "r", GRAPHS[kind][0](str(folder / "marks")))


def check(store: Store, folder: Path, kind: str) -> None:
    """What must hold of a workflow that has ended, however often its driver died."""
    state = read_run(store, "r")
    assert state.status is RunStatus.SUCCEEDED
    assert output(store, "r") == GRAPHS[kind][1]
    records = journal(store, "r")
    times = [record["time"] for record in records]
    assert times == sorted(times)
    commits: dict[str, dict[str, Any]] = {}
    for commit in (*of_kind(records, "step_succeeded"), *of_kind(records, "step_continued")):
        assert commit["step"] not in commits or commit["step"] in UNKEPT
        commits[commit["step"]] = commit
    assert set(commits) == set(state.steps)
    for name, commit in commits.items():
        started = [r for r in of_kind(records, "step_started") if r["step"] == name]
        assert all(r["seq"] <= commit["seq"] for r in started)
        assert len({r["attempt"] for r in started}) == len(started)
        ran = executions(folder / "marks", name)
        assert set(ran) <= {(r["epoch"], r["attempt"]) for r in started}
        assert all(epoch <= commit["epoch"] for epoch, _ in ran)
    for step in state.steps.values():
        for attempt in step.attempts:
            assert attempt.ended_at is not None
            assert attempt.ended_at >= attempt.started_at


@pytest.mark.fault
@pytest.mark.parametrize("kind", GRAPHS)
def test_a_workflows_driver_may_die_at_any_write(kind: str, tmp_path: Path) -> None:
    whole = tmp_path / "whole"
    store, graph = prepare(whole, kind)
    counting = CrashingStore(store.uri, at=NEVER, after=False)
    run_graph(counting, "r", graph)
    check(store, whole, kind)
    assert counting.writes >= 4

    died = 0
    for write in range(1, counting.writes + 1):
        for after in (False, True):
            folder = tmp_path / f"{write}-{after}"
            store, graph = prepare(folder, kind)
            try:
                run_graph(CrashingStore(store.uri, at=write, after=after), "r", graph)
            except Crash:
                died += 1
            if read_run(store, "r").status is not RunStatus.SUCCEEDED:
                run_graph(store, "r", graph)
            check(store, folder, kind)
    # Steps that end at the same moment share an entry, and then there are fewer writes.
    assert died >= 2 * counting.writes - (6 if kind == "fan-out" else 0)


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    kind=st.sampled_from(sorted(GRAPHS)),
    deaths=st.lists(st.tuples(st.integers(1, 16), st.booleans()), min_size=2, max_size=6),
)
def test_any_number_of_a_workflows_drivers_may_die(
    tmp_path_factory: pytest.TempPathFactory, kind: str, deaths: list[tuple[int, bool]]
) -> None:
    folder = tmp_path_factory.mktemp("deaths")
    store, graph = prepare(folder / "run", kind)
    for write, after in deaths:
        if read_run(store, "r").status is RunStatus.SUCCEEDED:
            break
        try:
            run_graph(CrashingStore(store.uri, at=write, after=after), "r", graph, lease_s=0.0)
        except Crash:
            continue
    if read_run(store, "r").status is not RunStatus.SUCCEEDED:
        run_graph(store, "r", graph, lease_s=0.0)
    check(store, folder / "run", kind)


@pytest.mark.fault
def test_a_request_to_cancel_a_workflow_outlives_a_driver_that_dies_at_any_write(tmp_path: Path) -> None:
    def attempt(folder: Path, write: int, after: bool) -> CrashingStore:
        (folder / "marks").mkdir(parents=True)
        store = Store(str(folder / "storage"))

        def ask() -> int:
            request_cancel(store, "r")
            return 1

        def later(value: int) -> None:
            mark(folder / "marks", "later")

        graph = record(store, "r", node(later, node(ask)))
        dying = CrashingStore(store.uri, at=write, after=after)
        died = False
        try:
            run_graph(dying, "r", graph)
        except Crash:
            died = True
        if not read_run(store, "r").cancel_requested:
            # It died before anybody asked.
            request_cancel(store, "r")
        if died and read_run(store, "r").status is not RunStatus.CANCELLED:
            run_graph(store, "r", graph)
        assert read_run(store, "r").status is RunStatus.CANCELLED
        assert executions(folder / "marks", "later") == []
        return dying

    writes = attempt(tmp_path / "whole", NEVER, False).writes
    for write in range(1, writes + 1):
        for after in (False, True):
            attempt(tmp_path / f"{write}-{after}", write, after)
