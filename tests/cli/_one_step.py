"""Workflows of one step, made and driven in this process, over real storage."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from verl_workflow.storage import Store
from verl_workflow.workflow import Driver, InlineLauncher, create_run
from verl_workflow.workflow._dag import is_node
from verl_workflow.workflow._definition import read_definition
from verl_workflow.workflow._graph import StepNode, graph_of
from verl_workflow.workflow._names import RunKey
from verl_workflow.workflow._node import save_graph
from verl_workflow.workflow._options import StepOptions
from verl_workflow.workflow._state import read_graph


def make_workflow(store: Store, workflow_id: str, function: Callable[..., Any], **options: Any) -> None:
    """Record a workflow of one step, ``only``."""
    node = StepNode(function, options=StepOptions(task_id="only", metadata={"color": "red"}, **options))
    key = RunKey.new(workflow_id)
    graph = graph_of(node, lambda found: found, store, f"{key.folder}/objects", is_node=is_node)
    saved = save_graph(graph, store, key.folder)
    record = {"graph": saved.graph_key, "sha256": saved.sha256, "root": "only", "metadata": {"owner": "me"}}
    create_run(store, workflow_id, {"workflow": record}, incarnation=key.incarnation)


def run_workflow(store: Store, workflow_id: str, function: Callable[..., Any], **options: Any) -> None:
    make_workflow(store, workflow_id, function, **options)
    record = read_definition(store, workflow_id)["definition"]["workflow"]
    Driver(store, workflow_id, read_graph(store, record["graph"], record["sha256"]), InlineLauncher()).run()
