"""The driver as a detached actor on a real Ray."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
from _pieces import executions, journal, of_kind

from verl_workflow.errors import ErrorCode, UserError
from verl_workflow.storage import Store
from verl_workflow.workflow import (
    RunState,
    RunStatus,
    StepStatus,
    create_run,
    driver_failure,
    read_run,
    request_cancel,
    start_driver,
)

LOADER = "_ray_plans:chain"


@pytest.fixture
def made(store: Store, marks: Path) -> Store:
    create_run(store, "r", {"folder": str(marks)})
    return store


def until(store: Store, ready: Callable[[RunState], bool]) -> RunState:
    for _ in range(600):
        state = read_run(store, "r")
        if ready(state):
            return state
        time.sleep(0.1)
    raise AssertionError(f"it did not come to that: {state}")


def gate_runs(state: RunState) -> bool:
    return "gate" in state.steps and state.steps["gate"].status is StepStatus.RUNNING


def assert_no_actor_is_left(ray: Any) -> None:
    for _ in range(200):
        left = ray.util.list_named_actors(all_namespaces=True)
        if not left:
            return
        time.sleep(0.1)
    raise AssertionError(left)


def test_a_driver_ends_the_run_and_leaves(ray_cluster: Any, made: Store, marks: Path) -> None:
    (marks / "go").touch()
    handle = start_driver(made.uri, "r", LOADER)
    state = until(made, lambda now: now.ended_at is not None)
    assert state.status is RunStatus.SUCCEEDED
    assert state.steps["last"].value == 3
    assert_no_actor_is_left(ray_cluster)
    assert driver_failure(handle) is None


@pytest.mark.fault
def test_a_killed_driver_is_restarted_and_replays(ray_cluster: Any, made: Store, marks: Path) -> None:
    handle = start_driver(made.uri, "r", LOADER)
    state = until(made, gate_runs)
    assert state.owner is not None
    worker = psutil.Process(int((marks / "gate.1.1").read_text())) if (marks / "gate.1.1").exists() else None
    psutil.Process(state.owner["pid"]).kill()
    until(made, lambda now: now.epoch == 2 and gate_runs(now))
    if worker is not None:
        # The worker of a step dies with the driver that owns it.
        worker.wait(20)
    assert driver_failure(handle) is None
    (marks / "go").touch()
    state = until(made, lambda now: now.ended_at is not None)
    assert state.status is RunStatus.SUCCEEDED
    assert executions(marks, "first") == [(1, 1)]
    assert [attempt.number for attempt in state.steps["gate"].attempts] == [1, 2]
    assert_no_actor_is_left(ray_cluster)


def test_a_driver_at_work_is_found_again(ray_cluster: Any, made: Store, marks: Path) -> None:
    first = start_driver(made.uri, "r", LOADER)
    until(made, gate_runs)
    second = start_driver(made.uri, "r", LOADER)
    assert second.token == first.token
    (marks / "go").touch()
    until(made, lambda now: now.ended_at is not None)
    assert len(of_kind(journal(made, "r"), "claimed")) == 1
    assert_no_actor_is_left(ray_cluster)


@pytest.mark.fault
def test_force_replaces_a_driver_at_work(ray_cluster: Any, made: Store, marks: Path) -> None:
    first = start_driver(made.uri, "r", LOADER)
    until(made, gate_runs)
    second = start_driver(made.uri, "r", LOADER, force=True)
    assert second.token != first.token
    until(made, lambda now: now.epoch == 2 and gate_runs(now))
    (marks / "go").touch()
    assert until(made, lambda now: now.ended_at is not None).status is RunStatus.SUCCEEDED
    assert_no_actor_is_left(ray_cluster)


def test_a_cancelled_driver_leaves(ray_cluster: Any, made: Store) -> None:
    start_driver(made.uri, "r", LOADER)
    until(made, gate_runs)
    request_cancel(made, "r")
    assert until(made, lambda now: now.ended_at is not None).status is RunStatus.CANCELLED
    assert_no_actor_is_left(ray_cluster)


@pytest.mark.parametrize(
    ("loader", "code", "words"),
    [
        ("_ray_plans:broken", ErrorCode.SPEC_INVALID, "pipeline.yaml:3:1: this plan cannot be made"),
        ("_ray_plans:no_such", ErrorCode.STEP_FAILED, "no_such"),
        ("no_such_module:f", ErrorCode.STEP_FAILED, "no_such_module"),
    ],
)
def test_why_a_driver_could_not_start_is_told(
    ray_cluster: Any, made: Store, loader: str, code: ErrorCode, words: str
) -> None:
    handle = start_driver(made.uri, "r", loader)
    assert_no_actor_is_left(ray_cluster)
    error = driver_failure(handle)
    assert error is not None
    assert error.code is code
    assert words in str(error)
    assert isinstance(error, UserError) == (code is ErrorCode.SPEC_INVALID)


def test_a_driver_of_an_unknown_run_is_not_started(ray_cluster: Any, store: Store) -> None:
    with pytest.raises(UserError) as caught:
        start_driver(store.uri, "r", LOADER)
    assert caught.value.code is ErrorCode.RUN_UNKNOWN
    assert ray_cluster.util.list_named_actors(all_namespaces=True) == []
