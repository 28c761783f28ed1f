"""Time limits that depend on what a step says of itself."""

from __future__ import annotations

import time

import pytest
from _graphs import node, record

from verl_workflow.errors import ErrorCode, VerlWorkflowError
from verl_workflow.storage import Store
from verl_workflow.workflow import Driver, InlineLauncher, RunState, RunStatus, current, read_run


def drive(store: Store, root: object) -> RunState:
    Driver(store, "r", record(store, "r", root), InlineLauncher(), lease_s=0.05, heartbeat_s=60.0, poll_s=0.02).run()
    return read_run(store, "r")


def test_a_step_that_beats_often_enough_is_not_stopped_however_short_its_limit(store: Store) -> None:
    def beating() -> None:
        for number in range(40):
            current().heartbeat(number=number)
            time.sleep(0.05)

    state = drive(store, node(beating, heartbeat_timeout_s=0.6))
    assert state.status is RunStatus.SUCCEEDED, state.error


def test_one_that_falls_silent_is(store: Store) -> None:
    def silent() -> None:
        current().heartbeat()
        time.sleep(30)

    state = drive(store, node(silent, heartbeat_timeout_s=0.6))
    assert state.error is not None
    assert state.error["code"] == ErrorCode.STEP_TIMEOUT.value


def test_a_limit_counts_though_the_first_sign_of_life_was_not_written(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    put, failed = Store.put, []

    def away_at_first(self: Store, key: str, data: bytes) -> None:
        if "/progress/" in key and not failed:
            failed.append(key)
            raise VerlWorkflowError(ErrorCode.STORAGE, "it is away for a moment", retryable=True)
        put(self, key, data)

    monkeypatch.setattr(Store, "put", away_at_first)
    state = drive(store, node(lambda: time.sleep(30), task_id="slow", timeout_s=0.5))
    assert failed
    assert state.error is not None
    assert state.error["code"] == ErrorCode.STEP_TIMEOUT.value
