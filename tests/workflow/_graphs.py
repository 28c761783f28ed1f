"""Graphs that the tests of durable execution run without a cluster, and what they must come to."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

from _pieces import drive

from verl_workflow.storage import Store
from verl_workflow.workflow import EventListener, RunState, create_run, current, read_run
from verl_workflow.workflow._dag import DagView, is_node
from verl_workflow.workflow._events import get_message, message_committed
from verl_workflow.workflow._graph import Graph, Names, StepNode, graph_of
from verl_workflow.workflow._names import RunKey
from verl_workflow.workflow._node import save_graph
from verl_workflow.workflow._options import StepOptions


class Planned(EventListener):
    """An event that is there at once, however often somebody asks; leaves a mark when told that it is committed."""

    async def poll_for_event(self, folder: str, name: str) -> tuple[str, str]:
        return folder, name

    async def event_checkpointed(self, event: tuple[str, str]) -> None:
        mark(*event)


def mark(folder: str | Path, name: str) -> None:
    """A file for an execution of a step, in this attempt of it."""
    context = current()
    (Path(folder) / f"{name}.{context.epoch}.{context.attempt}").touch()


def node(function: Callable[..., Any], *args: Any, **options: Any) -> StepNode:
    """A step that is called like its function."""
    name = getattr(function, "__name__", "") or function.func.__name__  # type: ignore[attr-defined]
    return StepNode(function, args, {}, StepOptions(**{"task_id": name, **options}))


def add(folder: str, name: str, *numbers: int) -> int:
    mark(folder, name)
    return 1 + sum(numbers)


def fail(folder: str, name: str) -> int:
    mark(folder, name)
    raise KeyError(name)


def down(folder: str, left: int, *, large: bool = False) -> Any:
    """Continues to itself until nothing is left."""
    mark(folder, f"down{left}")
    if left == 0:
        return b"x" * 5000 if large else 40
    return node(functools.partial(down, large=large), folder, left - 1, task_id=f"down{left - 1}")


def length(folder: str, value: Any) -> int:
    mark(folder, "length")
    return len(value)


def error_name(folder: str, pair: tuple[Any, BaseException | None]) -> str:
    mark(folder, "error_name")
    return type(pair[1]).__name__


def chain(folder: str) -> StepNode:
    step = node(add, folder, "s0", task_id="s0")
    for number in (1, 2, 3):
        step = node(add, folder, f"s{number}", step, task_id=f"s{number}")
    return step


def fan_out(folder: str) -> StepNode:
    first = node(add, folder, "first", task_id="first")
    middle = [node(add, folder, f"m{number}", first, task_id=f"m{number}") for number in range(4)]
    return node(add, folder, "last", *middle, task_id="last")


def continued(folder: str) -> StepNode:
    return node(add, folder, "after", node(down, folder, 3, task_id="down3"), task_id="after")


def continued_to_large(folder: str) -> StepNode:
    return node(length, folder, node(functools.partial(down, large=True), folder, 2, task_id="down2"))


def caught(folder: str) -> StepNode:
    return node(error_name, folder, node(fail, folder, "fail", task_id="fail", catch_exceptions=True))


def event(folder: str) -> StepNode:
    told = node(get_message, Planned, folder, "told", task_id="get_message", hosted=True)
    committed = node(message_committed, Planned, told, task_id="message_committed", hosted=True)
    return node(lambda folder, event: mark(folder, "handled") or event[1], folder, committed, task_id="handled")


def unkept(folder: str) -> StepNode:
    """The first two values are not written down."""
    first = node(add, folder, "u0", task_id="u0", checkpoint=False)
    second = node(add, folder, "u1", first, task_id="u1", checkpoint=False)
    return node(add, folder, "kept", node(add, folder, "k0", second, task_id="k0"), second, task_id="kept")


# Each with its output.
GRAPHS: dict[str, tuple[Callable[[str], StepNode], Any]] = {
    "chain": (chain, 4),
    "fan-out": (fan_out, 9),
    "continuation": (continued, 41),
    "continuation to a large value": (continued_to_large, 5000),
    "caught exception": (caught, "KeyError"),
    "event": (event, "told"),
    "values that are not kept": (unkept, 6),
}


def record(store: Store, run_id: str, root: StepNode) -> Graph:
    """A workflow as `workflow.run` records it; gives its graph."""
    key = RunKey.new(run_id)
    graph = graph_of(root, DagView(), store, f"{key.folder}/objects", is_node=is_node)
    saved = save_graph(graph, store, key.folder)
    workflow = {"graph": saved.graph_key, "sha256": saved.sha256, "root": Names().give(saved.names)[-1], "metadata": {}}
    create_run(store, run_id, {"workflow": workflow}, incarnation=key.incarnation)
    return graph


def output(store: Store, run_id: str) -> Any:
    """What the workflow has come to."""
    state = read_run(store, run_id)
    step = state.steps[state.definition["workflow"]["root"]]
    while step.committed is None and step.continued_to is not None:
        step = state.steps[step.continued_to]
    return step.value


def run_graph(store: Store, run_id: str, graph: Graph, **options: Any) -> RunState:
    return drive(store, run_id, graph, **options)  # type: ignore[arg-type]
