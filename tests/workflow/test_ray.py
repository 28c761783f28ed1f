"""Steps as real Ray tasks."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
from _pieces import executions, journal, of_kind
from _ray_plans import QUICK, Marked, in_a_module_of_the_worker, mark, refuse

from verl_workflow.errors import ErrorCode, UserError, VerlWorkflowError
from verl_workflow.storage import Store
from verl_workflow.workflow import (
    Driver,
    Plan,
    RayLauncher,
    RetryPolicy,
    RunState,
    RunStatus,
    Step,
    StepContext,
    create_run,
    read_run,
    request_cancel,
)

pytestmark = pytest.mark.usefixtures("ray_cluster")


def drive(store: Store, plan: Plan, **options: Any) -> RunState:
    return Driver(store, "r", plan, RayLauncher(), **{"lease_s": 0.1, "poll_s": 0.1, **options}).run()


@pytest.fixture(autouse=True)
def created(store: Store) -> None:
    create_run(store, "r", {})


def await_file(path: Path) -> str:
    for _ in range(600):
        if path.exists():
            return path.read_text()
        time.sleep(0.05)
    raise AssertionError(f"{path.name} did not come")


def test_branches_run_at_the_same_time_in_workers_and_report(store: Store, marks: Path) -> None:
    def meet(context: StepContext) -> int:
        mark(context, str(marks))
        context.report({"here": context.step})
        while len(list(marks.glob("*.1.1"))) < 3:
            time.sleep(0.05)
        return 1

    steps = [Step(name=name, call=meet, num_cpus=1.0) for name in ("a", "b", "c")]
    end = Step(name="end", call=lambda context: dict(context.inputs), after=("a", "b", "c"))
    state = drive(store, Plan(steps=(*steps, end)))
    assert state.status is RunStatus.SUCCEEDED
    assert state.steps["end"].value == {"a": 1, "b": 1, "c": 1}
    assert len({(marks / f"{name}.1.1").read_text() for name in "abc"}) == 3
    assert state.steps["a"].progress == {"here": "a"}


@pytest.mark.fault
def test_a_killed_worker_costs_an_attempt(store: Store, marks: Path) -> None:
    state = drive(store, Plan(steps=(Step(name="a", call=Marked(str(marks), die_at=1), retry=QUICK),)))
    assert state.status is RunStatus.SUCCEEDED
    first, second = state.steps["a"].attempts
    assert first.error is not None
    assert (first.error["code"], first.error["retryable"]) == ("worker_lost", True)
    assert (second.number, second.error) == (2, None)
    assert executions(marks, "a") == [(1, 1), (1, 2)]


def test_an_error_of_the_users_class_comes_back_as_itself(store: Store) -> None:
    state = drive(store, Plan(steps=(Step(name="a", call=refuse, retry=QUICK),)))
    assert state.status is RunStatus.FAILED
    error = state.steps["a"].attempts[-1].error
    assert error is not None
    assert error["code"] == "data_invalid"
    assert error["message"] == "7 rows are wrong (got 7)"
    assert "in refuse" in error["traceback"]
    assert len(state.steps["a"].attempts) == 1


def test_an_error_that_cannot_be_pickled_keeps_its_text(store: Store) -> None:
    def fail(context: StepContext) -> None:
        class Local(Exception):
            lock = threading.Lock()

            def __init__(self) -> None:
                super().__init__("holds a lock")
                self.held = threading.Lock()

        raise Local

    state = drive(store, Plan(steps=(Step(name="a", call=fail, retry=QUICK),)))
    assert state.error is not None
    assert "Local: holds a lock" in state.error["message"]
    assert "in fail" in state.error["traceback"]
    assert len(state.steps["a"].attempts) == QUICK.attempts


def test_an_error_of_a_class_that_only_the_worker_knows_is_told_as_it_is(store: Store) -> None:
    def fail(context: StepContext) -> None:
        class Simple(Exception):
            pass

        raise in_a_module_of_the_worker("only_in_the_worker", Simple=Simple)["Simple"]("plain")

    state = drive(store, Plan(steps=(Step(name="a", call=fail, retry=QUICK),)))
    assert state.error is not None
    assert (state.error["code"], state.error["message"]) == ("step_failed", "a: Simple: plain")
    assert "in fail" in state.error["traceback"]


def test_a_refusal_that_carries_what_only_the_worker_knows_stays_a_refusal(store: Store) -> None:
    def fail(context: StepContext) -> None:
        class Thing:
            def __repr__(self) -> str:
                return "<thing>"

        class Refusal(UserError):
            pass

        known = in_a_module_of_the_worker("known_to_the_worker", Thing=Thing, Refusal=Refusal)
        raise known["Refusal"](ErrorCode.DATA_INVALID, "wrong", value=known["Thing"](), remedy="Mend it.")

    state = drive(store, Plan(steps=(Step(name="a", call=fail, retry=QUICK),)))
    assert state.error is not None
    assert state.error["code"] == "data_invalid"
    assert "<thing>" in state.error["message"] and state.error["remedy"] == "Mend it."
    assert len(state.steps["a"].attempts) == 1


@pytest.mark.parametrize("needs", [{"num_cpus": 0.00001}, {"num_gpus": 1.5}])
def test_quantities_that_ray_does_not_know_fail_their_step_alone(
    store: Store, marks: Path, needs: dict[str, float]
) -> None:
    odd = Step(name="odd", call=Marked(str(marks)), retry=QUICK, **needs)  # type: ignore[arg-type]
    state = drive(store, Plan(steps=(Step(name="a", call=Marked(str(marks)), retry=QUICK), odd)))
    assert state.status is RunStatus.FAILED
    assert state.error is not None
    assert (state.error["code"], state.error["step"]) == ("spec_invalid", "odd")
    assert len(state.steps["odd"].attempts) == 1
    assert state.steps["a"].value == 1


def test_a_function_that_cannot_be_sent_fails_at_once(store: Store) -> None:
    numbers = (number for number in range(3))
    state = drive(store, Plan(steps=(Step(name="a", call=lambda context: next(numbers), retry=QUICK),)))
    assert state.status is RunStatus.FAILED
    assert "cannot be sent" in str(state.error)
    assert len(state.steps["a"].attempts) == 1


def raises_with_a_value_of_its_own_class(context: StepContext) -> None:
    class Colour(str):
        pass

    raise VerlWorkflowError(ErrorCode.STEP_FAILED, Colour("it is red"), value=[Colour("red")])


def test_an_error_with_values_that_only_its_worker_knows_is_told(store: Store) -> None:
    step = Step(name="a", call=raises_with_a_value_of_its_own_class, retry=RetryPolicy(attempts=1))
    state = drive(store, Plan(steps=(step,)))
    assert state.status is RunStatus.FAILED
    assert (state.error or {})["what"] == "it is red"
    assert (state.error or {})["value"] == "['red']"


def unloadable() -> None:
    raise ImportError("no module of this name here")


class Unloadable:
    def __call__(self, context: StepContext) -> None:
        raise AssertionError("never called")

    def __reduce__(self) -> Any:
        return unloadable, ()


def test_a_function_that_its_worker_cannot_load_fails_at_once(store: Store) -> None:
    state = drive(store, Plan(steps=(Step(name="a", call=Unloadable(), retry=QUICK),)))
    assert state.status is RunStatus.FAILED
    assert "no module of this name here" in str(state.error)
    assert len(state.steps["a"].attempts) == 1


@pytest.mark.fault
def test_a_step_over_its_time_limit_loses_its_worker(store: Store, marks: Path) -> None:
    once = RetryPolicy(attempts=1)
    plan = Plan(steps=(Step(name="a", call=Marked(str(marks), wait_for="never"), retry=once, timeout_s=6.0),))
    results: list[RunState] = []
    driving = threading.Thread(target=lambda: results.append(drive(store, plan)))
    driving.start()
    worker = psutil.Process(int(await_file(marks / "a.1.1")))
    driving.join(60)
    assert results[0].status is RunStatus.FAILED
    assert results[0].error is not None
    assert results[0].error["code"] == "step_timeout"
    worker.wait(20)


@pytest.mark.fault
def test_cancelling_kills_the_workers_of_running_steps(store: Store, marks: Path) -> None:
    steps = tuple(Step(name=name, call=Marked(str(marks), wait_for="never"), retry=QUICK) for name in "ab")
    results: list[RunState] = []
    driving = threading.Thread(target=lambda: results.append(drive(store, Plan(steps=steps))))
    driving.start()
    workers = [psutil.Process(int(await_file(marks / f"{name}.1.1"))) for name in "ab"]
    request_cancel(store, "r")
    driving.join(60)
    assert results[0].status is RunStatus.CANCELLED
    assert psutil.wait_procs(workers, timeout=20)[1] == []
    assert of_kind(journal(store, "r"), "step_failed") == []


def test_what_ray_did_is_read_without_ray(store: Store, marks: Path) -> None:
    state = drive(store, Plan(steps=(Step(name="a", call=Marked(str(marks))),)))
    assert read_run(store, "r").steps == state.steps
