from __future__ import annotations

import json
import threading
from typing import Any

from _runs import Invoke, Runs

from verl_workflow.errors import ErrorCode, VerlWorkflowError
from verl_workflow.workflow import StepContext


def lost() -> VerlWorkflowError:
    return VerlWorkflowError(ErrorCode.WORKER_LOST, "the worker was lost", retryable=True)


def without_times(text: str) -> list[str]:
    return [line.split(" began ")[0] + " began" if " began " in line else line for line in text.splitlines()]


def test_logs_tell_every_attempt_in_order(runs: Runs, invoke: Invoke) -> None:
    def trains(context: StepContext) -> Any:
        runs.log("r1", "train", context.attempt).write_text(f"attempt {context.attempt}\nhalf a line")
        if context.attempt == 1:
            raise lost()
        return {}

    runs.finish("r1", {"prepare": lambda _: {}, "train": trains}, attempts=2)
    shown = invoke("logs", "r1")
    assert shown.exit_code == 0
    lines = without_times(shown.stdout)
    assert lines[:2] == ["prepare#1 | -- began", "prepare#1 | -- succeeded"]
    assert lines[2:5] == ["train#1 | -- began", "train#1 | attempt 1", "train#1 | half a line"]
    assert lines[5].startswith("train#1 | -- failed: ")
    assert any(line.endswith("the worker was lost") for line in lines)
    assert lines[-4:] == [
        "train#2 | -- began",
        "train#2 | attempt 2",
        "train#2 | half a line",
        "train#2 | -- succeeded",
    ]


def test_one_stage_alone_and_as_json(runs: Runs, invoke: Invoke) -> None:
    runs.log("r1", "train", 1).write_text("hello\n")
    runs.finish("r1", {"prepare": lambda _: {}, "train": lambda _: {}})
    found = json.loads(invoke("logs", "r1", "--stage", "train", "--json").stdout)
    assert [(line["stage"], line["attempt"]) for line in found["lines"]] == [("train", 1)] * 3
    assert [line["line"] for line in found["lines"]][1:] == ["hello", "-- succeeded"]


def test_an_unknown_stage_gets_a_suggestion(runs: Runs, invoke: Invoke) -> None:
    runs.finish("r1", {"prepare": lambda _: {}, "train": lambda _: {}})
    shown = invoke("logs", "r1", "--stage", "trian")
    assert shown.exit_code == 2
    assert shown.stderr == "error: r1: the run has no such stage (got 'trian'). Did you mean 'train'?\n"


def test_following_tells_each_line_once_over_attempts_and_ends_with_the_run(runs: Runs, invoke: Invoke) -> None:
    following = threading.Event()

    def trains(context: StepContext) -> Any:
        with runs.log("r1", "train", context.attempt).open("a") as log:
            for index in range(50):
                log.write(f"line {context.attempt}.{index}\n")
                log.flush()
                following.wait(0.02)
        if context.attempt == 1:
            raise lost()
        return {}

    runs.create("r1", {"train": trains})
    thread = threading.Thread(target=runs.drive, args=("r1", {"train": trains}), kwargs={"attempts": 2}, daemon=True)
    thread.start()
    shown = invoke("logs", "r1", "--follow")
    thread.join(60)
    assert shown.exit_code == 0
    told = [line.partition(" | ")[2] for line in shown.stdout.splitlines()]
    assert [line for line in told if line.startswith("line")] == [
        f"line {attempt}.{index}" for attempt in (1, 2) for index in range(50)
    ]
    assert len([line for line in told if line.startswith("-- began")]) == 2
    assert told[-1] == "-- succeeded"
