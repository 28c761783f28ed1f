from __future__ import annotations

import json
import threading
from typing import Any

from _runs import Invoke, Runs

from verl_workflow.workflow import RunStatus, StepContext, read_run


def test_cancel_waits_until_the_run_is_seen_to_have_stopped(runs: Runs, invoke: Invoke) -> None:
    begun, forever = threading.Event(), threading.Event()

    def waits(context: StepContext) -> Any:
        begun.set()
        forever.wait(60)

    runs.create("r1", {"a": waits})
    thread = runs.drive_in_background("r1", {"a": waits})
    assert begun.wait(60)
    shown = invoke("cancel", "r1")
    assert (shown.exit_code, shown.stdout) == (0, "run r1: cancelled\n")
    assert read_run(runs.store, "r1").status is RunStatus.CANCELLED
    forever.set()
    thread.join(60)

    again = invoke("cancel", "r1", "--json")
    assert (again.exit_code, json.loads(again.stdout)["status"]) == (0, "cancelled")


def test_no_wait_returns_at_once(runs: Runs, invoke: Invoke) -> None:
    begun, forever = threading.Event(), threading.Event()

    def waits(context: StepContext) -> Any:
        begun.set()
        forever.wait(60)

    runs.create("r1", {"a": waits})
    thread = runs.drive_in_background("r1", {"a": waits})
    assert begun.wait(60)
    shown = invoke("cancel", "r1", "--no-wait")
    assert (shown.exit_code, shown.stdout) == (0, "run r1: asked to stop\n")
    thread.join(60)
    assert read_run(runs.store, "r1").status is RunStatus.CANCELLED
    forever.set()


def test_a_run_that_has_ended_is_not_cancelled(runs: Runs, invoke: Invoke) -> None:
    runs.finish("r1", {"a": lambda _: 1})
    shown = invoke("cancel", "r1")
    assert shown.exit_code == 2
    assert "has succeeded" in shown.stderr
    assert read_run(runs.store, "r1").status is RunStatus.SUCCEEDED
