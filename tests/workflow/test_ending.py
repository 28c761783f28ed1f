"""Cancelling and deleting while others are at work, or have just died."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from _flows import until
from _graphs import chain, record, run_graph

from verl_workflow import workflow
from verl_workflow.errors import ErrorCode, UserError
from verl_workflow.storage import Store
from verl_workflow.workflow import RunStatus, list_runs, read_run
from verl_workflow.workflow._definition import delete_run

DRIVE = """
import sys, time
from _graphs import node, record
from verl_workflow.storage import Store
from verl_workflow.workflow import Driver, InlineLauncher

store = Store(sys.argv[1])
Driver(store, "r", record(store, "r", node(time.sleep, 600, task_id="slow")), InlineLauncher()).run()
"""


@pytest.mark.fault
def test_a_driver_that_dies_before_it_meets_the_request_keeps_nobody_from_cancelling(store: Store) -> None:
    path = os.pathsep.join([str(Path(__file__).parent), *sys.path])
    driver = subprocess.Popen([sys.executable, "-c", DRIVE, store.uri], env={**os.environ, "PYTHONPATH": path})

    def runs() -> bool:
        return any(state.status is RunStatus.RUNNING for state in list_runs(store))

    try:
        until(runs, "running workflow")
        workflow.init(storage=store.uri)
        os.kill(driver.pid, signal.SIGSTOP)
        threading.Timer(0.5, driver.kill).start()
        workflow.cancel("r")
        assert workflow.get_status("r") is workflow.CANCELED
    finally:
        driver.kill()
        driver.wait()


def deleted_at(store: Store, monkeypatch: pytest.MonkeyPatch, part: str) -> None:
    """Somebody deletes the workflow just before a file of it is read."""
    get, get_all = Store.get, Store.get_all

    def strike(key: str) -> None:
        if part in key:
            monkeypatch.undo()
            delete_run(store, "r")

    def one(self: Store, key: str) -> bytes | None:
        strike(key)
        return get(self, key)

    def many(self: Store, keys: Any) -> Any:
        for key in keys:
            strike(key)
        return get_all(self, keys)

    monkeypatch.setattr(Store, "get", one)
    monkeypatch.setattr(Store, "get_all", many)


@pytest.mark.parametrize("part", ["/journal/", "/snapshots/"])
@pytest.mark.parametrize("ask", [workflow.get_status, workflow.cancel, workflow.get_output, workflow.gc])
def test_whoever_asks_for_one_that_is_just_being_deleted_is_told_that_there_is_none(
    store: Store, marks: Path, monkeypatch: pytest.MonkeyPatch, ask: Callable[[str], object], part: str
) -> None:
    run_graph(store, "r", record(store, "r", chain(str(marks))))
    workflow.init(storage=store.uri)
    workflow.gc("r")
    deleted_at(store, monkeypatch, part)
    try:
        ask("r")
    except workflow.WorkflowNotFoundError:
        assert list_runs(store) == []
    except UserError as error:
        assert (ask, error.code) == (workflow.cancel, ErrorCode.RUN_TERMINAL)
    else:
        # What was asked for did not need that file.
        assert read_run(store, "r").status is RunStatus.SUCCEEDED


@pytest.mark.parametrize("part", ["/graphs/", "/journal/"])
def test_metadata_of_one_that_is_just_being_deleted_is_that_of_none(
    store: Store, marks: Path, monkeypatch: pytest.MonkeyPatch, part: str
) -> None:
    run_graph(store, "r", record(store, "r", chain(str(marks))))
    workflow.init(storage=store.uri)
    deleted_at(store, monkeypatch, part)
    with pytest.raises(ValueError, match="No such workflow_id"):
        workflow.get_metadata("r", "s1")


def test_a_list_leaves_out_what_is_deleted_while_it_is_read(
    store: Store, marks: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_graph(store, "r", record(store, "r", chain(str(marks))))
    deleted_at(store, monkeypatch, "/journal/")
    assert list_runs(store) == []
