"""Steps that wait, among steps whose values are not kept."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import ray
from _flows import named, until
from _graphs import Planned, mark, node, output, record, run_graph
from _pieces import executions

from verl_workflow import workflow
from verl_workflow.storage import Store
from verl_workflow.workflow import Driver, EventListener, InlineLauncher, RayLauncher, RunStatus
from verl_workflow.workflow._events import get_message, message_committed
from verl_workflow.workflow._graph import Graph


class Once(EventListener):
    """Its event is used up by being told that it is committed."""

    async def poll_for_event(self, folder: str) -> str:
        mark(folder, "polled")
        if executions(Path(folder), "told"):
            raise LookupError("the event is used up")
        return folder

    async def event_checkpointed(self, event: str) -> None:
        mark(event, "told")


def breaks_until_mended(folder: str, value: Any) -> Any:
    if not (Path(folder) / "mended").exists():
        raise ValueError("broken")
    return value


def test_an_event_below_steps_that_are_not_kept_is_not_waited_for_again(store: Store, marks: Path) -> None:
    folder = str(marks)

    def await_it() -> Any:
        return workflow.wait_for_event(Once, folder)

    def use(event: str) -> str:
        mark(folder, "used")
        return f"used {Path(event).name}"

    used = node(use, node(await_it, checkpoint=False), checkpoint=False)
    graph = record(store, "r", node(breaks_until_mended, folder, used))
    assert run_graph(store, "r", graph).status is RunStatus.FAILED
    (marks / "mended").touch()
    state = run_graph(store, "r", graph)
    assert state.status is RunStatus.SUCCEEDED, state.error
    assert output(store, "r") == "used marks"
    # What uses the event was executed again, and was given it.
    assert len(executions(marks, "used")) == 2
    assert len(executions(marks, "polled")) == len(executions(marks, "told")) == 1


class Never(EventListener):
    """Its event does not come, but for `marks/come`."""

    async def poll_for_event(self, folder: str) -> str:
        mark(folder, "waits")
        while not (Path(folder) / "come").exists():
            await asyncio.sleep(0.02)
        return "came"


def test_a_failure_is_not_kept_back_by_an_event_that_never_comes(store: Store, marks: Path) -> None:
    folder = str(marks)

    def bad() -> str:
        # Not before the other one waits.
        while not executions(marks, "waits"):
            time.sleep(0.02)
        return breaks_until_mended(folder, "mended")  # type: ignore[no-any-return]

    def both(*values: Any) -> Any:
        return values

    graph = record(store, "r", node(both, node(bad), node(get_message, Never, folder, task_id="wait", hosted=True)))
    state = run_graph(store, "r", graph)
    assert state.status is RunStatus.FAILED
    assert state.error is not None
    assert state.error["step"] == "bad"
    for name in ("mended", "come"):
        (marks / name).touch()
    assert run_graph(store, "r", graph).status is RunStatus.SUCCEEDED
    assert output(store, "r") == ("mended", "came")


@ray.remote(num_cpus=0)
def rest(seconds: float) -> Any:
    return workflow.continuation(workflow.sleep(seconds))


@ray.remote(num_cpus=0)
def pair(*values: Any) -> Any:
    return values


@pytest.mark.usefixtures("flows")
def test_a_step_that_is_not_kept_may_go_on_with_one_that_waits() -> None:
    unkept = rest.options(**named("rest", checkpoint=False)).bind(0.1)
    assert workflow.run(pair.bind(unkept, pair.bind(unkept))) == (None, (None,))


def unkept(options: Any) -> Any:
    """As the options of waiting steps may be in workflows that were recorded long ago."""
    return dataclasses.replace(options, checkpoint=False)


@pytest.mark.usefixtures("ray_cluster")
def test_values_of_waiting_steps_that_are_not_kept_are_handed_on(store: Store, marks: Path) -> None:
    def use(event: tuple[str, str], *others: Any) -> tuple[str, int]:
        return event[1], len(others)

    told = node(get_message, Planned, str(marks), "told", hosted=True, ray={"num_cpus": 0})
    committed = node(message_committed, Planned, told, hosted=True)
    # To a worker, and to another step that waits.
    recorded = record(store, "r", node(use, committed, told))
    nodes = [dataclasses.replace(each, options=unkept(each.options)) for each in recorded.nodes]
    Driver(store, "r", Graph(nodes=tuple(nodes)), RayLauncher(), lease_s=0.1, poll_s=0.1).run()
    assert output(store, "r") == ("told", 1)


class Exits(EventListener):
    async def poll_for_event(self, folder: str) -> None:
        mark(folder, "exits")
        os._exit(1)


class UntilGo(EventListener):
    async def poll_for_event(self, folder: str, name: str) -> str:
        mark(folder, name)
        while not (Path(folder) / "go").exists():
            await asyncio.sleep(0.05)
        return name


@pytest.mark.usefixtures("flows")
def test_a_listener_that_ends_its_process_fails_alone(marks: Path) -> None:
    names = [f"beside{n}" for n in range(12)]
    beside = [
        workflow.run_async(workflow.wait_for_event(UntilGo, str(marks), name), workflow_id=name) for name in names
    ]
    until(lambda: all(executions(marks, name) for name in names), "waiting listeners")
    with pytest.raises(workflow.WorkflowExecutionError, match="process of the step was lost"):
        workflow.run(workflow.wait_for_event(Exits, str(marks)), workflow_id="bad")
    assert len(executions(marks, "exits")) == 4
    (marks / "go").touch()
    assert ray.get(beside, timeout=120) == names
    # Each has lost its process once with the bad one; those that were put together with that, once more.
    lost = sorted(len(executions(marks, name)) - 1 for name in names)
    assert lost[0] == 1
    assert lost[-1] <= 3


class Stubborn(EventListener):
    async def poll_for_event(self, folder: str) -> None:
        mark(folder, "stubborn")
        while True:
            try:
                await asyncio.sleep(600)
            except BaseException:  # noqa: BLE001 - what a user's bare `except:` does
                continue


@pytest.mark.usefixtures("flows")
def test_a_listener_that_does_not_stop_keeps_no_workflow_from_being_cancelled(marks: Path) -> None:
    beside = workflow.run_async(workflow.wait_for_event(UntilGo, str(marks), "beside"), workflow_id="beside")
    workflow.run_async(workflow.wait_for_event(Stubborn, str(marks)), workflow_id="bad")
    until(lambda: executions(marks, "stubborn") and executions(marks, "beside"), "waiting listeners")
    workflow.cancel("bad")
    assert workflow.get_status("bad") is workflow.CANCELED
    (marks / "go").touch()
    assert ray.get(beside, timeout=60) == "beside"


class CancelsItsOwn(EventListener):
    async def poll_for_event(self) -> None:
        inner = asyncio.ensure_future(asyncio.sleep(10))
        inner.cancel()
        await inner


@pytest.mark.skipif(sys.version_info < (3, 11), reason="a task of Python 3.10 does not know whether it is cancelled")
@pytest.mark.usefixtures("flows")
def test_a_listener_that_lets_a_cancellation_of_its_own_out_has_failed_of_that() -> None:
    with pytest.raises(workflow.WorkflowExecutionError, match="CancelledError"):
        workflow.run(workflow.wait_for_event(CancelsItsOwn))


def test_all_launchers_of_a_process_share_one_loop() -> None:
    assert InlineLauncher()._loop is InlineLauncher()._loop
