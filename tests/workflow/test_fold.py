from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from verl_workflow.errors import ErrorCode, VerlWorkflowError
from verl_workflow.workflow import TERMINAL_STATES, RunStatus, StepStatus
from verl_workflow.workflow._fold import fold
from verl_workflow.workflow._records import (
    CancelRequested,
    Claimed,
    Entry,
    Event,
    RunCancelled,
    RunFailed,
    RunSucceeded,
    StepFailed,
    StepStarted,
    StepSucceeded,
)

ERROR = {"code": "step_failed", "message": "no"}


def claimed() -> Claimed:
    return Claimed(owner={"pid": 1}, steps=["a", "b"])


def succeeded(step: str, attempt: int = 1) -> StepSucceeded:
    return StepSucceeded(step=step, attempt=attempt, value_key=f"values/{step}", sha256="0")


def failed(step: str, attempt: int, *, again: bool = False) -> StepFailed:
    return StepFailed(step=step, attempt=attempt, error=ERROR, will_retry=again, retry_in_s=5.0 if again else 0.0)


def entries(*events: Event) -> list[Entry]:
    """The events as drivers would number them, a second apart."""
    epoch = 0
    out = []
    for seq, event in enumerate(events):
        epoch += isinstance(event, Claimed)
        out.append(Entry(run="1", seq=seq, epoch=epoch, time=100.0 + seq, events=(event,)))
    return out


@st.composite
def histories(draw: st.DrawFn) -> list[Event]:
    """What drivers may write about two steps: starts, ends, takeovers, cancels, in any order that is allowed."""
    events: list[Event] = []
    numbers = {"a": 0, "b": 0}
    state = {"a": "waiting", "b": "waiting"}
    ended = owned = False
    for _ in range(draw(st.integers(0, 30))):
        allowed = ["cancel"]
        if not ended or isinstance(events[-1], RunFailed):
            allowed.append("claim")
        if owned and not ended:
            allowed += [f"start {name}" for name in state if state[name] == "waiting"]
            allowed += [
                f"{end} {name}" for end in ("ok", "fail", "retry") for name in state if state[name] == "running"
            ]
            allowed += ["end failed", "end cancelled"]
            if all(value == "done" for value in state.values()):
                allowed.append("end ok")
        action, _, name = draw(st.sampled_from(allowed)).partition(" ")
        if action == "cancel":
            if not ended:
                events.append(CancelRequested(by={}))
        elif action == "claim":
            owned, ended = True, False
            state = {name: "done" if value == "done" else "waiting" for name, value in state.items()}
            events.append(claimed())
        elif action == "start":
            numbers[name] += draw(st.integers(1, 2))
            state[name] = "running"
            events.append(StepStarted(step=name, attempt=numbers[name]))
        elif action == "ok":
            state[name] = "done"
            events.append(succeeded(name, numbers[name]))
        elif action in {"fail", "retry"}:
            state[name] = "waiting" if action == "retry" else "failed"
            events.append(failed(name, numbers[name], again=action == "retry"))
        else:
            ended = True
            events.append({"ok": RunSucceeded(), "failed": RunFailed(error=ERROR), "cancelled": RunCancelled()}[name])
    return events


@given(histories())
def test_every_history_of_correct_drivers_folds_and_adds_up(events: list[Event]) -> None:
    state = fold(entries(*events), "r")
    assert state.epoch == sum(isinstance(event, Claimed) for event in events)
    for name in ("a", "b"):
        step = state.step(name)
        numbers = [attempt.number for attempt in step.attempts]
        assert numbers == [event.attempt for event in events if isinstance(event, StepStarted) and event.step == name]
        commits = [event for event in events if isinstance(event, StepSucceeded) and event.step == name]
        assert (step.status is StepStatus.SUCCEEDED) == (len(commits) == 1)
        assert all(attempt.ended_at is not None for attempt in step.attempts[:-1])
        assert all(attempt.ended_at is None or attempt.ended_at >= attempt.started_at for attempt in step.attempts)
    if state.status in {RunStatus.SUCCEEDED, RunStatus.CANCELLED}:
        assert all(attempt.ended_at is not None for step in state.steps.values() for attempt in step.attempts)
    assert (state.ended_at is not None) == (state.status in TERMINAL_STATES)


@given(histories())
def test_entries_survive_their_files(events: list[Event]) -> None:
    for entry in entries(*events):
        assert Entry.from_bytes(entry.to_bytes(), "key", entry.seq, "1") == entry


def test_a_failed_step_gets_a_fresh_budget_when_the_run_is_resumed_and_only_then() -> None:
    tried = [claimed(), StepStarted(step="a", attempt=1), failed("a", 1, again=True)]
    assert fold(entries(*tried, claimed()), "r").step("a").failures == 1
    ended = [*tried, StepStarted(step="a", attempt=2), failed("a", 2), RunFailed(error=ERROR)]
    assert fold(entries(*ended), "r").step("a").failures == 2
    assert fold(entries(*ended, claimed()), "r").step("a").failures == 0


def test_an_attempt_whose_driver_was_lost_has_ended_and_does_not_count() -> None:
    step = fold(entries(claimed(), StepStarted(step="a", attempt=1), claimed()), "r").step("a")
    assert (step.status, step.failures) == (StepStatus.WAITING, 0)
    assert (step.attempts[0].status, step.attempts[0].ended_at) == (StepStatus.FAILED, 102.0)


def test_a_cancelled_run_leaves_no_step_running() -> None:
    log = [claimed(), StepStarted(step="a", attempt=1), CancelRequested(by={}), RunCancelled()]
    state = fold(entries(*log), "r")
    assert state.status is RunStatus.CANCELLED
    assert {step.status for step in state.steps.values()} == {StepStatus.CANCELLED}


@pytest.mark.parametrize(
    "events",
    [
        [StepStarted(step="a", attempt=1)],
        [claimed(), succeeded("a")],
        [claimed(), StepStarted(step="a", attempt=1), StepStarted(step="a", attempt=2)],
        [claimed(), StepStarted(step="a", attempt=1), claimed(), StepStarted(step="a", attempt=1)],
        [claimed(), StepStarted(step="a", attempt=1), succeeded("a"), StepStarted(step="a", attempt=2)],
        [claimed(), RunSucceeded(), StepStarted(step="a", attempt=1)],
        [claimed(), RunCancelled(), claimed()],
    ],
)
def test_what_no_correct_driver_writes_is_reported_with_its_file(events: list[Event]) -> None:
    with pytest.raises(VerlWorkflowError) as caught:
        fold(entries(*events), "r")
    assert caught.value.code is ErrorCode.JOURNAL_DAMAGED
    assert caught.value.where == f"runs/r/journal/{len(events) - 1:012}.json"


def test_a_writer_of_an_older_epoch_is_reported() -> None:
    log = entries(claimed(), claimed())
    late = Entry(run="1", seq=2, epoch=1, time=103.0, events=(StepStarted(step="a", attempt=1),))
    with pytest.raises(VerlWorkflowError, match="epoch 1 after epoch 2"):
        fold([*log, late], "r")


@pytest.mark.parametrize(
    "change",
    [
        {"kind": "unheard_of"},
        {"kind": None},
        {"seq": 4},
        {"run": "2"},
        {"run": None},
        {"epoch": "1"},
        {"time": None},
        {"attempt": True},
        {"step": 3},
        {"events": []},
        {"events": None},
        {"events": ["claimed"]},
    ],
)
def test_an_entry_that_is_not_as_written_is_reported_with_its_file(change: dict[str, object]) -> None:
    good = json.loads(entries(claimed(), StepStarted(step="a", attempt=1))[1].to_bytes())
    name = next(iter(change))
    (good if name in good else good["events"][0]).update(change)
    with pytest.raises(VerlWorkflowError) as caught:
        Entry.from_bytes(json.dumps(good).encode(), "runs/r/journal/1", 1, "1")
    assert caught.value.code is ErrorCode.JOURNAL_DAMAGED
    assert "runs/r/journal/1" in str(caught.value)
    assert "Restore" in caught.value.remedy


@pytest.mark.parametrize("data", [b"", b"[]", b"\xff\xfe", b'{"kind": "claimed", "seq'])
def test_bytes_that_are_no_entry_are_reported(data: bytes) -> None:
    with pytest.raises(VerlWorkflowError) as caught:
        Entry.from_bytes(data, "runs/r/journal/0", 0, "1")
    assert caught.value.code is ErrorCode.JOURNAL_DAMAGED


def test_fields_of_later_versions_are_passed_over() -> None:
    entry = entries(claimed())[0]
    found = json.loads(entry.to_bytes())
    data = json.dumps({**found, "new": 1, "events": [{**event, "new": 1} for event in found["events"]]}).encode()
    assert Entry.from_bytes(data, "key", 0, "1") == entry
