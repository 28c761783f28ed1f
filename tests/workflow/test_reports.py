"""What steps say of themselves while they run."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
from _graphs import node, output, record, run_graph

from verl_workflow.storage import Store
from verl_workflow.workflow import RetryPolicy, RunStatus, current, read_run


class Wordless:
    def __str__(self) -> str:
        raise RuntimeError("no words")


def circle() -> list[Any]:
    found: list[Any] = []
    found.append(found)
    return found


@pytest.mark.parametrize("wrong", [{(1, 2): "key"}, circle(), Wordless()])
def test_details_that_json_cannot_hold_are_refused_in_the_step_that_gives_them(store: Store, wrong: Any) -> None:
    def step() -> str:
        # Not the first, which is written at once.
        current().heartbeat(done=1)
        try:
            current().heartbeat(done=wrong)
        except (TypeError, ValueError, RuntimeError):
            return "refused"
        return "taken"

    run_graph(store, "r", record(store, "r", node(step)))
    assert output(store, "r") == "refused"
    assert read_run(store, "r").steps["step"].progress == {"done": 1}


def test_details_that_are_no_json_but_have_a_text_are_reported_by_it(store: Store) -> None:
    def step() -> Any:
        found = current()
        if found.attempt == 1:
            found.heartbeat(file=Path("a/b"), sizes=(1, 2), by={1: {"x"}})
            raise ConnectionError
        return found.last_heartbeat

    policy = RetryPolicy(attempts=2, backoff_s=0.0)
    run_graph(store, "r", record(store, "r", node(step, retry=policy)))
    assert output(store, "r") == {"file": "a/b", "sizes": [1, 2], "by": {"1": "{'x'}"}}


def test_details_are_what_they_were_when_they_were_given(store: Store) -> None:
    def step() -> None:
        current().heartbeat(done=0)
        rows: list[Any] = [1]
        current().heartbeat(rows=rows)
        # Before that has been written.
        rows.append(rows)

    state = run_graph(store, "r", record(store, "r", node(step)))
    assert state.status is RunStatus.SUCCEEDED, state.error
    assert read_run(store, "r").steps["step"].progress == {"rows": [1]}


@pytest.mark.parametrize("pause_s", [0.0, 1.1])
def test_a_mere_sign_of_life_does_not_make_the_details_before_it_forgotten(store: Store, pause_s: float) -> None:
    def step() -> Any:
        found = current()
        if found.attempt < 3:
            found.heartbeat(rows=found.attempt)
            time.sleep(pause_s)
            found.heartbeat()
            raise ConnectionError
        return found.last_heartbeat

    policy = RetryPolicy(attempts=3, backoff_s=0.0)
    run_graph(store, "r", record(store, "r", node(step, retry=policy)))
    assert output(store, "r") == {"rows": 2}
