"""What a step's graph says of it."""

from __future__ import annotations

from typing import Any

from verl_workflow.errors import ErrorCode, VerlWorkflowError
from verl_workflow.storage import Store
from verl_workflow.workflow._graph import Names
from verl_workflow.workflow._options import StepOptions
from verl_workflow.workflow._state import RunState, read_graph, read_steps


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
    for step in read_steps(store, state.key).steps.values():
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


# What a step's retries follow, whether it was said by a RetryPolicy or in Ray's own words.
_POLICY = ("attempts", "crashes", "backoff_s", "factor", "longest_s")


def step_metadata(state: RunState, task_id: str, store: Store) -> dict[str, Any]:
    """As `get_metadata` gives it. Raises ValueError when there is no such step."""
    found = node_of(state, task_id, store)
    if found is None:
        raise ValueError(f"No such task_id '{task_id}' in workflow '{state.run_id}'")
    options, after = found
    step = state.steps.get(task_id)
    attempts = step.attempts if step is not None else ()
    return {
        "task_id": task_id,
        "task_options": {
            "task_type": "FUNCTION",
            "max_retries": options.max_retries,
            "catch_exceptions": bool(options.catch_exceptions),
            "retry_exceptions": bool(options.retry_exceptions),
            "retry": {name: getattr(options.policy, name) for name in _POLICY},
            "checkpoint": options.checkpoint is not False,
            "ray_options": dict(options.ray),
        },
        "user_metadata": dict(options.metadata),
        "workflow_refs": list(after),
        "stats": stats(attempts[0].started_at if attempts else None, attempts[-1].ended_at if attempts else None),
        "attempts": [
            {
                "number": each.number,
                "status": each.status.value,
                "start_time": each.started_at,
                "end_time": each.ended_at,
                "error": None if each.error is None else each.error.get("message"),
            }
            for each in attempts
        ],
    }


def stats(started: float | None, ended: float | None) -> dict[str, float]:
    """The times that are known."""
    known = {"start_time": started, "end_time": ended}
    return {name: at for name, at in known.items() if at is not None}
