"""What a step's graph says of it."""

from __future__ import annotations

from verl_workflow.errors import ErrorCode, VerlWorkflowError
from verl_workflow.storage import Store
from verl_workflow.workflow._graph import Names
from verl_workflow.workflow._journal import Journal
from verl_workflow.workflow._options import StepOptions
from verl_workflow.workflow._state import RunState, read_graph


def node_of(state: RunState, task_id: str, store: Store) -> tuple[StepOptions, tuple[str, ...]] | None:
    """A step's options and the steps that it waits for, None when no graph of the workflow has it."""
    for graph_key, sha256, names in graphs_of(state, store):
        if task_id in names:
            node = read_graph(store, graph_key, sha256).nodes[names.index(task_id)]
            return node.options, tuple(names[number] for number in node.after)
    return None


def graphs_of(state: RunState, store: Store) -> list[tuple[str, str, list[str]]]:
    """Key, digest and steps' names of the workflow's graph, and of all that its steps have continued to."""
    workflow = state.definition.get("workflow")
    if workflow is None:
        return []
    first = read_graph(store, workflow["graph"], workflow["sha256"])
    found = [(workflow["graph"], workflow["sha256"], Names().give(node.name for node in first.nodes))]
    folded = Journal(store, state.run_id).read()
    for step in folded.steps.values():
        if step.continued is not None:
            found.append((step.continued.graph_key, step.continued.sha256, step.continued.steps))
    return found


def module_path(state: RunState, store: Store) -> tuple[str, ...]:
    """Folders in which Python looked for modules where the workflow was made; empty for a pipeline's run, and when
    the graph that says so cannot be read.
    """
    workflow = state.definition.get("workflow")
    if workflow is None:
        return ()
    try:
        return read_graph(store, workflow["graph"], workflow["sha256"]).path
    except VerlWorkflowError as error:
        if error.code is not ErrorCode.JOURNAL_DAMAGED:
            raise
        return ()
