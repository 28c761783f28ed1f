"""Kill the driver before and after every single storage write, take the run up again, and look what came of it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from _pieces import IMPATIENT, Crash, CrashingStore, Marking, diamond, drive, executions, journal, of_kind
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from verl_workflow.storage import Store
from verl_workflow.workflow import Plan, RunStatus, Step, StepContext, create_run, read_run, request_cancel

NEVER = 1_000_000


def chain(folder: Path) -> Plan:
    steps = [
        Step(name=f"s{n}", call=Marking(folder), after=(f"s{n - 1}",) if n else (), retry=IMPATIENT) for n in range(3)
    ]
    return Plan(steps=tuple(steps))


class FailingFirst(Marking):
    def __call__(self, context: StepContext) -> int:
        value = super().__call__(context)
        if context.attempt == 1:
            raise RuntimeError("the first attempt fails")
        return value


def retried(folder: Path) -> Plan:
    return Plan(
        steps=(
            Step(name="a", call=FailingFirst(folder), retry=IMPATIENT),
            Step(name="b", call=FailingFirst(folder), after=("a",), retry=IMPATIENT),
        )
    )


def cached(folder: Path) -> Plan:
    """One step that an earlier run has a result for, and one that makes a result for later ones."""
    return Plan(
        steps=(
            Step(name="a", call=Marking(folder), key=lambda inputs: "known", retry=IMPATIENT),
            Step(name="b", call=Marking(folder), key=lambda inputs: "new", after=("a",), retry=IMPATIENT),
        )
    )


PLANS: dict[str, tuple[Callable[[Path], Plan], dict[str, int]]] = {
    "chain": (chain, {"s0": 1, "s1": 2, "s2": 3}),
    "diamond": (diamond, {"a": 1, "b": 3, "c": 4, "d": 10}),
    "retried": (retried, {"a": 1, "b": 2}),
    "cached": (cached, {"a": 41, "b": 42}),
}


def prepare(folder: Path) -> Store:
    (folder / "marks").mkdir(parents=True)
    store = Store(str(folder / "storage"))
    store.put("cache/known.json", b'{"run_id": "earlier", "value": 41}')
    create_run(store, "r", {})
    return store


def check(store: Store, folder: Path, values: dict[str, int]) -> None:
    """What must hold of a run that has ended, however often its driver died."""
    state = read_run(store, "r")
    assert state.status is RunStatus.SUCCEEDED
    assert {name: step.value for name, step in state.steps.items()} == values
    records = journal(store, "r")
    assert sorted(record["step"] for record in of_kind(records, "step_succeeded")) == sorted(values)
    assert [record["time"] for record in records] == sorted(record["time"] for record in records)
    for name in values:
        started = [(r["epoch"], r["attempt"]) for r in of_kind(records, "step_started") if r["step"] == name]
        commit = next(r for r in of_kind(records, "step_succeeded") if r["step"] == name)
        assert all(r["seq"] < commit["seq"] for r in of_kind(records, "step_started") if r["step"] == name)
        assert len({attempt for _, attempt in started}) == len(started)
        ran = executions(folder / "marks", name)
        assert set(ran) <= set(started)
        assert all(epoch <= commit["epoch"] for epoch, _ in ran)


@pytest.mark.parametrize("kind", PLANS)
def test_a_driver_may_die_at_any_write(kind: str, tmp_path: Path) -> None:
    make, values = PLANS[kind]
    whole = tmp_path / "whole"
    prepare(whole)
    counting = CrashingStore(str(whole / "storage"), at=NEVER, after=False)
    drive(counting, "r", make(whole / "marks"))
    check(counting, whole, values)
    assert counting.writes > 2 * len(values)

    for write in range(1, counting.writes + 1):
        for after in (False, True):
            folder = tmp_path / f"{write}-{after}"
            store = prepare(folder)
            plan = make(folder / "marks")
            crashing = CrashingStore(store.uri, at=write, after=after)
            try:
                drive(crashing, "r", plan)
            except Crash:
                pass
            else:
                # Steps that end at the same moment share an entry.
                assert crashing.writes < write <= counting.writes
            if read_run(store, "r").status is not RunStatus.SUCCEEDED:
                drive(store, "r", plan)
            check(store, folder, values)


def test_a_result_that_others_may_re_use_outlives_a_driver_that_dies_before_its_commit(tmp_path: Path) -> None:
    spared = 0
    for write in range(1, 12):
        folder = tmp_path / str(write)
        store = prepare(folder)
        plan = cached(folder / "marks")
        with pytest.raises(Crash):
            drive(CrashingStore(store.uri, at=write, after=True), "r", plan)
        ran = executions(folder / "marks", "b")
        kept = store.get("cache/new.json") is not None
        if read_run(store, "r").status is RunStatus.SUCCEEDED:
            break
        committed = bool(of_kind(journal(store, "r"), "step_succeeded")) and read_run(store, "r").steps["b"].committed
        drive(store, "r", plan)
        if kept:
            assert executions(folder / "marks", "b") == ran
            spared += committed is None
    assert spared >= 2


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    kind=st.sampled_from(sorted(PLANS)),
    deaths=st.lists(st.tuples(st.integers(1, 20), st.booleans()), min_size=2, max_size=6),
)
def test_any_number_of_drivers_may_die(
    tmp_path_factory: pytest.TempPathFactory, kind: str, deaths: list[tuple[int, bool]]
) -> None:
    make, values = PLANS[kind]
    folder = tmp_path_factory.mktemp("deaths")
    store = prepare(folder)
    plan = make(folder / "marks")
    for write, after in deaths:
        if read_run(store, "r").status is RunStatus.SUCCEEDED:
            break
        try:
            drive(CrashingStore(store.uri, at=write, after=after), "r", plan, lease_s=0.0)
        except Crash:
            continue
    if read_run(store, "r").status is not RunStatus.SUCCEEDED:
        drive(store, "r", plan, lease_s=0.0)
    check(store, folder, values)


def test_a_request_to_cancel_outlives_a_driver_that_dies_at_any_write(tmp_path: Path) -> None:
    def attempt(folder: Path, write: int, after: bool) -> CrashingStore:
        store = prepare(folder)
        dying = CrashingStore(store.uri, at=write, after=after)

        def ask(context: StepContext) -> int:
            request_cancel(store, "r")
            return 1

        plan = Plan(
            steps=(
                Step(name="a", call=ask, retry=IMPATIENT),
                Step(name="b", call=Marking(folder / "marks"), after=("a",), retry=IMPATIENT),
            )
        )
        died = False
        try:
            drive(dying, "r", plan)
        except Crash:
            died = True
        if not read_run(store, "r").cancel_requested:
            # It died before anybody asked.
            request_cancel(store, "r")
        if died and read_run(store, "r").status is not RunStatus.CANCELLED:
            drive(store, "r", plan)
        assert read_run(store, "r").status is RunStatus.CANCELLED
        assert executions(folder / "marks", "b") == []
        return dying

    writes = attempt(tmp_path / "whole", NEVER, False).writes
    for write in range(1, writes + 1):
        for after in (False, True):
            attempt(tmp_path / f"{write}-{after}", write, after)
