"""Workflows as users build them, driven by a driver of this process: no Ray is started."""

from __future__ import annotations

from typing import Any

from verl_workflow.storage import Store
from verl_workflow.workflow import Driver, InlineLauncher, RunState, create_run
from verl_workflow.workflow._dag import DagView, is_node
from verl_workflow.workflow._definition import read_definition
from verl_workflow.workflow._graph import Names, graph_of
from verl_workflow.workflow._names import RunKey
from verl_workflow.workflow._node import save_graph
from verl_workflow.workflow._state import read_graph


def record(store: Store, workflow_id: str, dag: Any, **metadata: Any) -> None:
    """What `workflow.run_async` writes down, before any host knows of it."""
    key = RunKey.new(workflow_id)
    graph = graph_of(dag, DagView(), store, f"{key.folder}/objects", is_node=is_node)
    saved = save_graph(graph, store, key.folder)
    root = Names().give(saved.names)[-1]
    stored = {"graph": saved.graph_key, "sha256": saved.sha256, "root": root, "metadata": metadata}
    create_run(store, workflow_id, {"workflow": stored}, incarnation=key.incarnation)


def drive_workflow(store: Store, workflow_id: str, **options: Any) -> RunState:
    """Drive a recorded workflow to its end, with little patience for other drivers."""
    workflow = read_definition(store, workflow_id)["definition"]["workflow"]
    graph = read_graph(store, workflow["graph"], workflow["sha256"])
    timing = {"lease_s": 0.05, "heartbeat_s": 60.0, "poll_s": 0.02}
    return Driver(store, workflow_id, graph, InlineLauncher(), **{**timing, **options}).run()
