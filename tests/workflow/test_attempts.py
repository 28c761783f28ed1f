"""Attempts on a real cluster: how they are tried again, bounded in time, and what they know of themselves."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import ray
from _flows import (
    AlsoRefused,
    Refused,
    attempts_of,
    executions,
    gather,
    go,
    mark,
    marked,
    named,
    refusing_until,
    started,
    until,
    waiting,
)

from verl_workflow import workflow
from verl_workflow.errors import ErrorCode, VerlWorkflowError
from verl_workflow.storage import Store

pytestmark = pytest.mark.usefixtures("flows")


# Events and sleep


class FileListener(workflow.EventListener):
    """The event is what a file holds."""

    async def poll_for_event(self, folder: Path, name: str) -> str:
        import asyncio

        mark(folder, "polled")
        while not (folder / name).exists():
            await asyncio.sleep(0.02)
        return (folder / name).read_text()

    async def event_checkpointed(self, event: str) -> None:
        folder, storage, _ = event.split("|")
        steps = workflow.read_run(Store(storage), "w").steps
        polled = next(step for name, step in steps.items() if "get_message" in name)
        mark(Path(folder), "told" if polled.value == event else "told too early")


def test_an_event_is_committed_and_then_the_listener_is_told(flows: Path, marks: Path) -> None:
    event = f"{marks}|{flows}|hello"
    ref = workflow.run_async(gather.bind([workflow.wait_for_event(FileListener, marks, "event")]), workflow_id="w")
    started(marks, "polled")
    assert ray.wait([ref], timeout=0.3)[0] == []
    (marks / ".event").write_text(event)
    (marks / ".event").rename(marks / "event")
    assert ray.get(ref) == [event]
    assert (executions(marks, "polled"), executions(marks, "told")) == (1, 1)
    assert executions(marks, "told too early") == 0


def test_an_event_that_was_committed_is_not_polled_again(flows: Path, marks: Path) -> None:
    (marks / "event").write_text(f"{marks}|{flows}|hello")
    event = workflow.wait_for_event(FileListener, marks, "event")
    with pytest.raises(workflow.WorkflowExecutionError):
        workflow.run(refusing_until.bind(marks, "last", "mended", event), workflow_id="w")
    (marks / "mended").touch()
    assert workflow.resume("w") == f"{marks}|{flows}|hello"
    assert (executions(marks, "polled"), executions(marks, "told")) == (1, 1)


def test_a_waiting_event_can_be_cancelled(marks: Path) -> None:
    workflow.run_async(workflow.wait_for_event(FileListener, marks, "never"), workflow_id="w")
    started(marks, "polled")
    workflow.cancel("w")
    assert workflow.get_status("w") is workflow.CANCELED


def test_a_waiting_event_whose_process_is_lost_is_waited_for_again(flows: Path, marks: Path) -> None:
    ref = workflow.run_async(workflow.wait_for_event(FileListener, marks, "event"), workflow_id="w")
    started(marks, "polled")
    (polled,) = marks.glob("polled.*")
    os.kill(int(polled.read_text()), signal.SIGKILL)
    until(lambda: executions(marks, "polled") == 2, "second call")
    (marks / "event").write_text(f"{marks}|{flows}|hello")
    assert ray.get(ref) == f"{marks}|{flows}|hello"


def test_wait_for_event_wants_a_listener_class() -> None:
    for wrong in (int, 5, FileListener()):
        with pytest.raises(TypeError, match=r"is not a subclass of workflow\.EventListener"):
            workflow.wait_for_event(wrong)


def test_sleep_lasts_so_long_and_gives_none() -> None:
    before = time.monotonic()
    assert workflow.run(workflow.sleep(0.7)) is None
    assert time.monotonic() - before >= 0.7


def test_sleep_begins_when_what_it_waits_for_has_ended() -> None:
    @ray.remote
    def seconds() -> float:
        time.sleep(0.5)
        return 0.5

    before = time.monotonic()
    workflow.run(workflow.sleep(seconds.bind()))
    assert time.monotonic() - before >= 1.0


# The attempt, seen from within


def test_current_tells_a_step_of_itself() -> None:
    @ray.remote
    def about() -> tuple[Any, ...]:
        found = workflow.current()
        return found.run_id, found.step, found.attempt, found.last_heartbeat

    assert workflow.run(about.options(**named("me")).bind(), workflow_id="w") == ("w", "me", 1, None)
    with pytest.raises(RuntimeError, match=r"workflow\.current\(\) is for functions that a workflow executes"):
        workflow.current()


def test_the_idempotency_token_is_one_for_all_attempts_and_another_for_each_step(marks: Path) -> None:
    @ray.remote(max_retries=2, retry_exceptions=True)
    def token(folder: Path) -> tuple[str, int]:
        found = workflow.current()
        (folder / f"token.{found.step}.{found.attempt}").write_text(found.idempotency_token)
        if found.attempt < 3:
            raise Refused
        return found.idempotency_token, found.attempt

    one, two = token.options(**named("one")).bind(marks), token.options(**named("two")).bind(marks)
    (first, attempts), (second, _) = workflow.run(gather.bind([one, two]), workflow_id="w")
    assert attempts == 3
    assert {(marks / f"token.one.{n}").read_text() for n in (1, 2, 3)} == {first}
    assert first != second
    assert workflow.run(gather.bind([token.options(**named("one")).bind(marks)]), workflow_id="v")[0][0] != first


def test_an_attempt_finds_what_an_earlier_one_reported_even_when_that_was_killed() -> None:
    @ray.remote(max_retries=1)
    def steps() -> Any:
        found = workflow.current()
        if found.attempt == 1:
            found.heartbeat(done=3)
            time.sleep(0.2)
            os._exit(1)
        return found.last_heartbeat

    assert workflow.run(steps.bind()) == {"done": 3}


# Attempts


def test_errors_are_not_retried_unless_asked_for(marks: Path) -> None:
    with pytest.raises(workflow.WorkflowExecutionError):
        workflow.run(refusing_until.options(max_retries=5).bind(marks, "a", "never"))
    assert executions(marks, "a") == 1


def test_max_retries_bounds_errors_when_they_are_retried(marks: Path) -> None:
    step = refusing_until.options(max_retries=2, retry_exceptions=True, **named("a"))
    with pytest.raises(workflow.WorkflowExecutionError):
        workflow.run(step.bind(marks, "a", "never"), workflow_id="w")
    assert executions(marks, "a") == 3
    assert attempts_of("w", "a") == [(1, "failed"), (2, "failed"), (3, "failed")]


def test_a_policy_retries_the_classes_it_names_and_their_subclasses(marks: Path) -> None:
    @ray.remote
    def raises(folder: Path, name: str, error: BaseException) -> int:
        if mark(folder, name) < 3:
            raise error
        return 1

    policy = workflow.RetryPolicy(attempts=3, backoff_s=0.0, on=(Refused,), never=(AlsoRefused,))
    step = raises.options(**workflow.options(retry=policy))
    assert workflow.run(step.bind(marks, "on", Refused())) == 1
    for name, error in (("never", AlsoRefused()), ("other", KeyError("k"))):
        with pytest.raises(workflow.WorkflowExecutionError) as failed:
            workflow.run(step.bind(marks, name, error))
        assert type(failed.value.__cause__) is type(error)
        assert executions(marks, name) == 1


def test_a_policy_pauses_longer_each_time(marks: Path) -> None:
    policy = workflow.RetryPolicy(attempts=3, backoff_s=0.4, factor=2.0)
    step = refusing_until.options(**named("a", retry=policy))
    with pytest.raises(workflow.WorkflowExecutionError):
        workflow.run(step.bind(marks, "a", "never"), workflow_id="w")
    first, second, third = workflow.get_metadata("w", "a")["attempts"]
    assert second["start_time"] - first["end_time"] >= 0.39
    assert third["start_time"] - second["end_time"] >= 0.79


def test_lost_processes_have_a_budget_apart_from_that_of_errors(marks: Path) -> None:
    @ray.remote
    def unlucky(folder: Path) -> int:
        count = mark(folder, "a")
        if count in (1, 3):
            os._exit(1)
        if count in (2, 4):
            raise Refused
        return count

    policy = workflow.RetryPolicy(attempts=3, crashes=2, backoff_s=0.0)
    assert workflow.run(unlucky.options(**workflow.options(retry=policy)).bind(marks)) == 5


def test_the_budget_of_lost_processes_ends(marks: Path) -> None:
    @ray.remote
    def dies(folder: Path) -> None:
        mark(folder, "a")
        os._exit(1)

    policy = workflow.RetryPolicy(attempts=5, crashes=1, backoff_s=0.0)
    with pytest.raises(workflow.WorkflowExecutionError) as failed:
        workflow.run(dies.options(**workflow.options(retry=policy)).bind(marks))
    assert isinstance(failed.value.__cause__, VerlWorkflowError)
    assert failed.value.__cause__.code is ErrorCode.WORKER_LOST
    assert executions(marks, "a") == 2


def test_an_attempt_that_takes_too_long_is_stopped_and_tried_again(marks: Path) -> None:
    @ray.remote
    def slow_first(folder: Path) -> int:
        if mark(folder, "a") == 1:
            time.sleep(60)
        return workflow.current().attempt

    policy = workflow.RetryPolicy(attempts=2, backoff_s=0.0)
    before = time.monotonic()
    step = slow_first.options(**named("a", timeout_s=1.0, retry=policy))
    assert workflow.run(step.bind(marks), workflow_id="w") == 2
    assert time.monotonic() - before < 30
    first, _ = workflow.get_metadata("w", "a")["attempts"]
    assert "took longer than 1 s" in first["error"]


def test_the_time_of_an_attempt_does_not_run_while_it_waits_for_a_cpu(marks: Path) -> None:
    busy = waiting.options(num_cpus=4).remote(marks, "busy")
    started(marks, "busy")
    quick = marked.options(num_cpus=4, **named("quick", timeout_s=1.5)).bind(marks, "quick", 0)
    ref = workflow.run_async(quick, workflow_id="w")
    until(lambda: workflow.get_status("w") is workflow.RUNNING, "driver")
    time.sleep(2.5)
    assert executions(marks, "quick") == 0
    go(marks)
    assert ray.get([busy, ref]) == [None, 0]
    assert attempts_of("w", "quick") == [(1, "succeeded")]


def test_an_attempt_without_signs_of_life_is_stopped_and_one_with_them_is_not(marks: Path) -> None:
    @ray.remote
    def beats(folder: Path, silent: bool) -> int:
        found = workflow.current()
        if silent and found.attempt == 1:
            time.sleep(60)
        for n in range(5):
            found.heartbeat(n=n)
            time.sleep(0.7)
        return found.attempt

    policy = workflow.RetryPolicy(attempts=2, backoff_s=0.0)
    step = beats.options(**named("a", heartbeat_timeout_s=2.5, retry=policy))
    assert workflow.run(
        gather.options(num_cpus=0).bind([step.bind(marks, False), step.bind(marks, True)]), workflow_id="w"
    ) == [1, 2]
    assert "no sign of life for 2.5 s" in workflow.get_metadata("w", "a_1")["attempts"][0]["error"]
