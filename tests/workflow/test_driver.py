from __future__ import annotations

import asyncio
import dataclasses
import logging
import shutil
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from _pieces import IMPATIENT, Marking, diamond, drive, executions, journal, of_kind

from verl_workflow.errors import ErrorCode, UserError, VerlWorkflowError
from verl_workflow.storage import Store
from verl_workflow.workflow import (
    Plan,
    RetryPolicy,
    RunStatus,
    Step,
    StepContext,
    StepStatus,
    create_run,
    read_run,
    request_cancel,
)


@pytest.fixture(autouse=True)
def created(store: Store) -> None:
    create_run(store, "r", {"asked": 1})


def single(call: Any, **options: Any) -> Plan:
    return Plan(steps=(Step(name="only", call=call, **{"retry": IMPATIENT, **options}),))


def test_values_flow_along_the_plan(store: Store, marks: Path) -> None:
    state = drive(store, "r", diamond(marks))
    assert state.status is RunStatus.SUCCEEDED
    assert {name: step.value for name, step in state.steps.items()} == {"a": 1, "b": 3, "c": 4, "d": 10}
    assert list(state.steps) == ["a", "b", "c", "d"]
    assert state.definition == {"asked": 1}


def test_steps_that_do_not_wait_for_each_other_run_at_the_same_time(store: Store) -> None:
    meeting = threading.Barrier(3, timeout=20)

    def meet(context: StepContext) -> str:
        meeting.wait()
        return context.step

    steps = tuple(Step(name=name, call=meet, retry=RetryPolicy(attempts=1)) for name in "abc")
    assert drive(store, "r", Plan(steps=steps)).status is RunStatus.SUCCEEDED


def test_an_error_is_retried_with_its_attempts_and_traceback_kept(store: Store) -> None:
    def fail_twice(context: StepContext) -> int:
        if context.attempt < 3:
            raise RuntimeError(f"no {context.attempt}")
        return context.attempt

    step = drive(store, "r", single(fail_twice)).steps["only"]
    assert step.value == 3
    assert [attempt.status.value for attempt in step.attempts] == ["failed", "failed", "succeeded"]
    error = step.attempts[0].error
    assert error is not None
    assert error["message"] == "only: RuntimeError: no 1"
    assert "in fail_twice" in error["traceback"]


def test_the_pause_before_a_retry_is_journaled_and_kept_by_the_next_driver(store: Store) -> None:
    def fail(context: StepContext) -> None:
        raise RuntimeError("no")

    with pytest.raises(RuntimeError, match="stop here"):
        drive(_StopAfter(store.uri, "step_failed"), "r", single(fail, retry=RetryPolicy(backoff_s=0.3)))
    assert of_kind(journal(store, "r"), "step_failed")[0]["retry_in_s"] == 0.3
    drive(store, "r", single(lambda context: 1, retry=RetryPolicy(backoff_s=0.3)))
    failed, started = of_kind(journal(store, "r"), "step_failed")[0], of_kind(journal(store, "r"), "step_started")[1]
    assert started["time"] - failed["time"] >= 0.3


class _StopAfter(Store):
    def __init__(self, uri: str, kind: str) -> None:
        super().__init__(uri)
        self._kind = f'"kind": "{kind}"'.encode()

    def create(self, key: str, data: bytes) -> bool:
        created = super().create(key, data)
        if self._kind in data:
            raise RuntimeError("stop here")
        return created


class Unpicklable(Exception):
    def __init__(self, first: int, second: int) -> None:
        super().__init__(f"{first} and {second}")


@pytest.mark.parametrize(
    ("error", "attempts"),
    [
        (UserError(ErrorCode.DATA_INVALID, "wrong rows", retryable=True), 1),
        (VerlWorkflowError(ErrorCode.NO_PROGRESS, "stuck"), 1),
        (VerlWorkflowError(ErrorCode.CAPACITY, "full", retryable=True), 3),
        (Unpicklable(1, 2), 3),
        (SystemExit(3), 3),
    ],
)
def test_only_errors_that_may_pass_are_retried(store: Store, error: BaseException, attempts: int) -> None:
    def fail(context: StepContext) -> None:
        raise error

    state = drive(store, "r", single(fail))
    assert state.status is RunStatus.FAILED
    assert state.error is not None
    assert str(error) in state.error["message"]
    assert state.error["step"] == "only"
    assert len(state.steps["only"].attempts) == attempts


class Speechless(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no words")


@pytest.mark.parametrize("error", [KeyboardInterrupt(), GeneratorExit(), asyncio.CancelledError("x"), Speechless()])
def test_whatever_a_step_raises_is_told_by_its_type(store: Store, error: BaseException) -> None:
    def fail(context: StepContext) -> None:
        raise error

    state = drive(store, "r", single(fail))
    assert state.error is not None
    assert state.error["code"] == "step_failed"
    assert type(error).__name__ in state.error["message"]
    assert "in fail" in state.error["traceback"]


def test_a_value_that_json_cannot_hold_fails_at_once(store: Store) -> None:
    state = drive(store, "r", single(lambda context: {"x": float("nan")}))
    assert state.error is not None
    assert "JSON" in state.error["message"]
    assert len(state.steps["only"].attempts) == 1


def test_after_a_failure_running_siblings_are_awaited_and_nothing_new_starts(store: Store, marks: Path) -> None:
    failed = threading.Event()

    def fail(context: StepContext) -> None:
        raise UserError(ErrorCode.DATA_INVALID, "no")

    def slow(context: StepContext) -> int:
        assert failed.wait(20)
        return 1

    class Watching(Store):
        def create(self, key: str, data: bytes) -> bool:
            done = super().create(key, data)
            if b'"kind": "step_failed"' in data:
                failed.set()
            return done

    plan = Plan(
        steps=(
            Step(name="bad", call=fail),
            Step(name="slow", call=slow),
            Step(name="next", call=Marking(marks), after=("slow",)),
        )
    )
    state = drive(Watching(store.uri), "r", plan)
    assert state.status is RunStatus.FAILED
    assert state.steps["slow"].status is StepStatus.SUCCEEDED
    assert state.steps["next"].status is StepStatus.WAITING
    assert journal(store, "r")[-1]["kind"] == "run_failed"
    assert executions(marks, "next") == []


def test_a_failed_run_is_resumed_with_new_attempts_and_without_finished_steps(store: Store, marks: Path) -> None:
    def fail(context: StepContext) -> None:
        raise RuntimeError("no")

    first = Step(name="first", call=Marking(marks), retry=IMPATIENT)
    bad = Plan(steps=(first, Step(name="second", call=fail, after=("first",), retry=IMPATIENT)))
    good = Plan(steps=(first, Step(name="second", call=Marking(marks), after=("first",), retry=IMPATIENT)))
    assert drive(store, "r", bad).status is RunStatus.FAILED
    assert drive(store, "r", bad).status is RunStatus.FAILED
    state = drive(store, "r", good)
    assert state.status is RunStatus.SUCCEEDED
    assert state.error is None
    assert [attempt.number for attempt in state.steps["second"].attempts] == [1, 2, 3, 4, 5, 6, 7]
    assert executions(marks, "first") == [(1, 1)]


@pytest.mark.parametrize("end", ["succeeded", "cancelled"])
def test_a_run_that_has_ended_for_good_is_not_taken(store: Store, marks: Path, end: str) -> None:
    if end == "succeeded":
        drive(store, "r", diamond(marks))
    else:
        request_cancel(store, "r")
    before = journal(store, "r")
    with pytest.raises(UserError) as caught:
        drive(store, "r", diamond(marks), force=True)
    assert caught.value.code is ErrorCode.RUN_TERMINAL
    assert journal(store, "r") == before


def test_a_step_over_its_time_limit_is_stopped_and_tried_again(store: Store) -> None:
    release = threading.Event()

    def hang_once(context: StepContext) -> int:
        if context.attempt == 1:
            release.wait(30)
        return context.attempt

    try:
        step = drive(store, "r", single(hang_once, timeout_s=0.3)).steps["only"]
    finally:
        release.set()
    assert step.value == 2
    assert step.attempts[0].error is not None
    assert step.attempts[0].error["code"] == "step_timeout"
    assert "0.3 s" in step.attempts[0].error["message"]


def test_cancelling_ends_running_steps_and_is_final(store: Store) -> None:
    started, release = threading.Event(), threading.Event()

    def hang(context: StepContext) -> None:
        started.set()
        release.wait(30)

    plan = Plan(steps=(Step(name="a", call=hang), Step(name="b", call=hang, after=("a",))))
    results = []
    driving = threading.Thread(target=lambda: results.append(drive(store, "r", plan)))
    driving.start()
    try:
        assert started.wait(20)
        assert request_cancel(store, "r").cancel_requested
        driving.join(20)
    finally:
        release.set()
    assert results[0].status is RunStatus.CANCELLED
    assert {step.status for step in results[0].steps.values()} == {StepStatus.CANCELLED}
    assert [record["kind"] for record in journal(store, "r")][-2:] == ["cancel_requested", "run_cancelled"]


def test_a_run_without_a_driver_is_cancelled_at_once_and_twice_is_no_error(store: Store) -> None:
    assert request_cancel(store, "r").status is RunStatus.CANCELLED
    assert request_cancel(store, "r").status is RunStatus.CANCELLED


def test_a_request_to_cancel_that_finds_the_run_ended_changes_nothing(store: Store, marks: Path) -> None:
    drive(store, "r", diamond(marks))
    before = journal(store, "r")
    with pytest.raises(UserError) as caught:
        request_cancel(store, "r")
    assert caught.value.code is ErrorCode.RUN_TERMINAL
    assert journal(store, "r") == before


def test_progress_shows_while_a_step_runs_and_its_last_word_stays(store: Store) -> None:
    seen = []

    def report(context: StepContext) -> None:
        context.report({"step": 1})
        seen.append(read_run(store, "r").steps["only"].progress)
        for number in range(2, 50):
            context.report({"step": number})
        seen.append(read_run(store, "r").steps["only"].progress)

    state = drive(store, "r", single(report))
    assert seen == [{"step": 1}, {"step": 1}]
    assert state.steps["only"].progress == {"step": 49}


def test_progress_held_back_is_shown_though_nothing_follows(store: Store) -> None:
    seen = []

    def report(context: StepContext) -> None:
        context.report({"phase": "first"})
        context.report({"phase": "second"})
        while read_run(store, "r").steps["only"].progress != {"phase": "second"}:
            time.sleep(0.05)
        seen.append("second")

    drive(store, "r", single(report, timeout_s=20.0))
    assert seen == ["second"]


def test_a_result_is_reused_by_another_run_and_only_if_it_verifies(
    store: Store, marks: Path, caplog: pytest.LogCaptureFixture
) -> None:
    usable = True

    def verify(value: Any) -> None:
        assert value == 5
        if not usable:
            raise VerlWorkflowError(ErrorCode.FILE_MISSING, "its file is gone")

    first = Step(name="first", call=Marking(marks, 5), key=lambda inputs: "first-key", verify=verify)
    second = Step(name="second", call=Marking(marks, 1), after=("first",), key=lambda inputs: f"k{inputs['first']}")
    plan = Plan(steps=(first, second))
    drive(store, "r", plan)
    create_run(store, "again", {})
    state = drive(store, "again", plan)
    assert {name: (step.value, step.reused_from) for name, step in state.steps.items()} == {
        "first": (5, "r"),
        "second": (6, "r"),
    }
    assert state.steps["first"].attempts == ()
    assert of_kind(journal(store, "again"), "step_started") == []

    usable = False
    create_run(store, "third", {})
    with caplog.at_level(logging.INFO, "verl_workflow.workflow"):
        state = drive(store, "third", plan)
    assert state.steps["first"].reused_from is None
    assert len(state.steps["first"].attempts) == 1
    assert state.steps["second"].reused_from == "r"
    assert "its file is gone" in caplog.text


def test_a_damaged_cache_entry_is_passed_over(store: Store, marks: Path) -> None:
    store.put("cache/k.json", b'{"run_id": "x", "va')
    plan = Plan(steps=(Step(name="a", call=Marking(marks), key=lambda inputs: "k"),))
    assert drive(store, "r", plan).steps["a"].reused_from is None


@pytest.mark.parametrize("key", ["../out", "a/b", ""])
def test_a_cache_key_that_could_leave_its_folder_fails_the_step(store: Store, marks: Path, key: str) -> None:
    plan = Plan(steps=(Step(name="a", call=Marking(marks), key=lambda inputs: key),))
    state = drive(store, "r", plan)
    assert state.status is RunStatus.FAILED
    assert "a.key" in str(state.error)
    assert executions(marks, "a") == []


def test_an_error_in_a_key_function_is_in_the_journal(store: Store, marks: Path) -> None:
    def key(inputs: Any) -> str:
        raise KeyError("lost")

    state = drive(store, "r", Plan(steps=(Step(name="a", call=Marking(marks), key=key),)))
    assert state.status is RunStatus.FAILED
    assert "lost" in str(state.error)


def test_times_never_go_back_whatever_the_clocks_say(
    store: Store, marks: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = iter(range(2_000_000_000, 0, -1000))
    monkeypatch.setattr("verl_workflow.workflow._journal.time.time", lambda: float(next(clock)))
    state = drive(store, "r", diamond(marks))
    times = [record["time"] for record in journal(store, "r")]
    assert times == sorted(times)
    for step in state.steps.values():
        for attempt in step.attempts:
            assert attempt.ended_at is not None
            assert attempt.ended_at >= attempt.started_at


@pytest.mark.parametrize("stand_in", [False, True], ids=["gone", "another"])
def test_a_storage_that_is_away_for_a_while_loses_no_commit(tmp_path: Path, marks: Path, stand_in: bool) -> None:
    root, away = tmp_path / "mounted", tmp_path / "away"

    def leave(context: StepContext) -> int:
        root.rename(away)
        if stand_in:
            # What a mount leaves behind.
            root.mkdir()
        return Marking(marks, 1)(context)

    steps = (
        Step(name="a", call=Marking(marks, 1)),
        Step(name="b", call=leave, after=("a",)),
        Step(name="c", call=Marking(marks, 1), after=("b",)),
    )
    store = Store(str(root))
    create_run(store, "kept", {})
    with pytest.raises(VerlWorkflowError) as caught:
        drive(store, "kept", Plan(steps=steps))
    assert (caught.value.code, caught.value.retryable) == (ErrorCode.STORAGE, True)
    assert not stand_in or [path for path in root.rglob("*") if "journal" in str(path)] == []
    if root.exists():
        shutil.rmtree(root)
    away.rename(root)
    whole = tuple(dataclasses.replace(step, call=Marking(marks, 1)) for step in steps)
    state = drive(Store(str(root)), "kept", Plan(steps=whole))
    assert state.status is RunStatus.SUCCEEDED
    assert [len(executions(marks, name)) for name in "abc"] == [1, 2, 1]
