"""What a workflow is given: stored once, whatever uses it, and by whatever way it goes on."""

from __future__ import annotations

from typing import Any

import pytest
from _workflows import drive_workflow
from ray.dag import InputNode

from verl_workflow.storage import Store
from verl_workflow.workflow import RunStatus, create_run, read_run
from verl_workflow.workflow._dag import DagView, is_node
from verl_workflow.workflow._definition import delete_run, run_key
from verl_workflow.workflow._fork import copy_workflow
from verl_workflow.workflow._gc import collect
from verl_workflow.workflow._graph import Names, StepNode, graph_of
from verl_workflow.workflow._names import RunKey
from verl_workflow.workflow._node import save_graph
from verl_workflow.workflow._options import StepOptions

LARGE = "x" * 100_000
STEPS = 20


def length(text: str, deeper: dict[str, list[str]]) -> int:
    return len(text) + len(deeper["in"][0])


def total(*numbers: int) -> int:
    return sum(numbers)


@pytest.fixture
def wide(store: Store) -> Store:
    """A workflow "w" of steps that all take the same input, as an argument and deeper in one."""
    key = RunKey.new("w")
    with InputNode() as given:
        steps = [
            StepNode(length, (given, {"in": [given]}), {}, StepOptions(task_id=f"s{number}")) for number in range(STEPS)
        ]
    root = StepNode(total, tuple(steps), {}, StepOptions(task_id="total"))
    graph = graph_of(root, DagView((LARGE,)), store, f"{key.folder}/objects", is_node=is_node)
    saved = save_graph(graph, store, key.folder)
    record = {"graph": saved.graph_key, "sha256": saved.sha256, "root": Names().give(saved.names)[-1], "metadata": {}}
    create_run(store, "w", {"workflow": record}, incarnation=key.incarnation)
    return store


def value_of(store: Store, workflow_id: str) -> Any:
    state = read_run(store, workflow_id)
    assert state.status is RunStatus.SUCCEEDED
    return state.steps["total"].value


def test_a_large_input_is_stored_once_whatever_uses_it(wide: Store) -> None:
    drive_workflow(wide, "w")
    assert value_of(wide, "w") == STEPS * 2 * len(LARGE)
    assert sum(wide.size(key) or 0 for key in wide.list("runs/w")) < 2 * len(LARGE)


def test_a_large_input_goes_along_with_a_fork_and_outlives_gc_and_the_first_workflow(wide: Store) -> None:
    drive_workflow(wide, "w")
    key = RunKey.new("fork")
    forked = copy_workflow(wide, read_run(wide, "w"), "s3", key)
    create_run(wide, "fork", forked.definition, incarnation=key.incarnation, seed=forked.seed)
    collect(wide, "w", stale_after_s=0)
    assert any("/objects/" in name for name in wide.list(run_key(wide, "w").folder))
    delete_run(wide, "w")
    drive_workflow(wide, "fork")
    assert value_of(wide, "fork") == STEPS * 2 * len(LARGE)


def test_a_large_input_that_is_not_the_recorded_one_is_damage(wide: Store) -> None:
    (kept,) = (name for name in wide.list("runs/w") if "/objects/" in name)
    wide.put(kept, b"another")
    state = drive_workflow(wide, "w")
    assert state.status is RunStatus.FAILED
    assert (state.error or {})["code"] == "journal_damaged"
    assert kept in (state.error or {})["message"]
