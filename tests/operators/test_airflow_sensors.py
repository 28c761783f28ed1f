from __future__ import annotations

import asyncio
import threading
import time
from typing import Any

import pytest
from _journals import GOOD, create, drive, failing, finish
from _models_made import MODEL, make_versions
from _task_context import Task, rebuilt
from airflow.sdk.exceptions import AirflowFailException, AirflowSkipException
from verl_airflow.sensors import ModelAliasSensor, VerlRunSensor

from verl_workflow.errors import ErrorCode, UserError, VerlWorkflowError
from verl_workflow.storage import Store
from verl_workflow.workflow import request_cancel


def run_sensor(storage: str, **options: Any) -> Task:
    wanted = {"poke_interval": 0.02, "timeout": 20, "run_id": "night", "storage": storage, **options}
    return Task(lambda: VerlRunSensor(task_id="wait", **wanted))


def alias_sensor(storage: str, **options: Any) -> Task:
    wanted = {"poke_interval": 0.02, "timeout": 20, "model": MODEL, "storage": storage, **options}
    return Task(lambda: ModelAliasSensor(task_id="wait", **wanted))


@pytest.mark.parametrize("deferrable", [True, False])
def test_a_run_is_waited_for_from_before_it_is_there(storage: str, deferrable: bool) -> None:
    threading.Timer(0.2, finish, (storage, "night")).start()
    assert run_sensor(storage, deferrable=deferrable).run()["version"] == "v0001"


def test_a_run_that_has_succeeded_already_needs_no_triggerer(storage: str) -> None:
    finish(storage, "night")
    work = run_sensor(storage)
    assert work.make().execute(work.context())["run_id"] == "night"


@pytest.mark.parametrize("deferrable", [True, False])
def test_a_run_that_fails_fails_the_sensor(storage: str, deferrable: bool) -> None:
    error = UserError(ErrorCode.DATA_INVALID, "no rows")
    threading.Timer(0.2, finish, (storage, "night", failing(error))).start()
    with pytest.raises(AirflowFailException, match=r"failed \(data\): no rows"):
        run_sensor(storage, deferrable=deferrable).run()


def test_a_run_that_fails_can_be_waited_on_until_it_is_resumed(storage: str) -> None:
    finish(storage, "night", failing(VerlWorkflowError(ErrorCode.WORKER_LOST, "lost")))
    threading.Timer(0.3, drive, (storage, "night", {"train": GOOD["train"]})).start()
    assert run_sensor(storage, fail_fast=False).run()["rewards"] == {"train": 0.93}


def test_a_run_that_is_cancelled_fails_the_sensor(storage: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from verl_workflow.workflow import _state

    monkeypatch.setattr(_state, "LEASE_S", 0.01)
    create(storage, "night")
    time.sleep(0.05)
    request_cancel(Store(storage), "night")
    with pytest.raises(AirflowFailException, match="cancelled"):
        run_sensor(storage, fail_fast=False).run()


def test_a_failure_can_skip_what_follows(storage: str) -> None:
    work = run_sensor(storage, soft_fail=True)
    deferred = work.start()
    finish(storage, "night", failing(UserError(ErrorCode.DATA_INVALID, "no rows")))
    from _task_context import wait

    event = wait(deferred)
    with pytest.raises(AirflowSkipException):
        work.make().resume_execution(deferred.method_name, {"event": event}, work.context())


def test_a_kill_of_a_sensor_leaves_the_run_alone(storage: str) -> None:
    create(storage, "night")
    deferred = run_sensor(storage).start()
    asyncio.run(rebuilt(deferred.trigger).on_kill())
    from verl_workflow.workflow import read_run

    assert not read_run(Store(storage), "night").cancel_requested


def test_a_storage_that_cannot_be_named_ends_the_task() -> None:
    with pytest.raises(AirflowFailException, match="storage cannot be opened"):
        run_sensor("ftp://there").run()


@pytest.mark.parametrize("deferrable", [True, False])
def test_an_alias_is_waited_for_from_before_the_model_is_there(storage: str, deferrable: bool) -> None:
    threading.Timer(0.2, make_versions, (storage, 1)).start()
    found = alias_sensor(storage, deferrable=deferrable).run()
    assert found == {"model": MODEL, "alias": "champion", "version": "v0001", "number": 1}


def test_a_version_or_a_later_move_can_be_waited_for(storage: str) -> None:
    registry = make_versions(storage, 2)
    assert alias_sensor(storage, version="v0002").run()["number"] == 2
    work = alias_sensor(storage, version="v0001", after=2)
    deferred = work.start()
    registry.set_alias(MODEL, "champion", "v0001", 2)
    assert work.finish(deferred)["number"] == 3


def test_a_wait_ends_at_its_timeout(storage: str) -> None:
    deferred = alias_sensor(storage, timeout=60).start()
    assert deferred.timeout is not None
    assert deferred.timeout.total_seconds() == 60  # type: ignore[union-attr]
