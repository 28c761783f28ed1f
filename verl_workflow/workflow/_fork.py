"""A new workflow that begins where another one was: what it takes over is copied, and recorded as its seed."""

from __future__ import annotations

import base64
import dataclasses
import hashlib
from collections.abc import Sequence
from typing import Any

from verl_workflow.errors import ErrorCode, UserError
from verl_workflow.storage import Store
from verl_workflow.workflow._definition import read_definition
from verl_workflow.workflow._fold import Folded
from verl_workflow.workflow._graph import Graph, Names
from verl_workflow.workflow._guard import dependents
from verl_workflow.workflow._metadata import graphs_of
from verl_workflow.workflow._names import RunKey, path_part
from verl_workflow.workflow._node import save_graph
from verl_workflow.workflow._records import Event, StepContinued, StepSucceeded
from verl_workflow.workflow._references import moved
from verl_workflow.workflow._state import RunState, read_graph, read_steps


@dataclasses.dataclass(frozen=True, kw_only=True)
class Fork:
    """What `create_run` is to record. Attributes: seed: events of the steps that are taken over."""

    definition: dict[str, Any]
    seed: list[dict[str, Any]]


def taken_steps(state: RunState, from_step: str, store: Store) -> set[str]:
    """The steps of a workflow that do not depend on `from_step`, through continuations too; finished or not.

    Raises:
        UserError(USAGE_INVALID): this is a pipeline's run. ValueError: it has no such step.
    """
    if "workflow" not in state.definition:
        raise UserError(
            ErrorCode.USAGE_INVALID,
            "a pipeline's run cannot be forked",
            where=state.run_id,
            remedy="Start a new run: finished stages with the same inputs are re-used.",
        )
    graphs = [(read_graph(store, key, sha256), names) for key, sha256, names in graphs_of(state, store)]
    known = {name for _, names in graphs for name in names}
    if from_step not in known:
        raise ValueError(f"No such task_id '{from_step}' in workflow '{state.run_id}'")
    continued = {
        name: step.continued.steps
        for name, step in read_steps(store, state.key).steps.items()
        if step.continued is not None
    }
    dropped: set[str] = set()
    left = {from_step}
    while left:
        dropped |= dependents(graphs, state, left)
        # A step that runs again returns its steps anew.
        left = {inner for name, inners in continued.items() if name in dropped for inner in inners} - dropped
    return known - dropped


def check_fork(store: Store, state: RunState, from_step: str, new_id: str) -> None:
    """Raise what is wrong with a wish for a fork before anything is written; as `taken_steps`.

    Raises:
        UserError: RUN_ID_INVALID, or RUN_EXISTS: the new id is taken.
    """
    taken_steps(state, from_step, store)
    try:
        read_definition(store, new_id)
    except UserError as error:
        if error.code is not ErrorCode.RUN_UNKNOWN:
            raise
        return
    raise id_taken(store, new_id)


def id_taken(store: Store, new_id: str) -> UserError:
    return UserError(
        ErrorCode.RUN_EXISTS,
        "a workflow of this id exists already",
        where=store.uri,
        value=new_id,
        remedy="Choose another id, or resume that one.",
    )


def copy_workflow(store: Store, state: RunState, from_step: str, new: RunKey) -> Fork:
    """Copy what a fork takes over into its own folder: the graphs, the values of finished steps, and their objects.

    Nothing of it counts before the fork is recorded. Raises as `taken_steps`, and VerlWorkflowError(JOURNAL_DAMAGED)
    when a file is not what was recorded.
    """
    taken = taken_steps(state, from_step, store)
    folded = read_steps(store, state.key)
    workflow = dict(state.definition["workflow"])
    names = Names().give(node.name for node in read_graph(store, workflow["graph"], workflow["sha256"]).nodes)
    graph_key, sha256 = _copied_graph(store, workflow["graph"], workflow["sha256"], new, folded, names)
    workflow |= {"graph": graph_key, "sha256": sha256, "forked_from": {"workflow_id": state.run_id, "step": from_step}}
    events = [event for name in folded.steps if name in taken for event in _taken(store, folded, state, name, new)]
    return Fork(
        definition={**state.definition, "workflow": workflow},
        seed=[{"kind": event.KIND, **vars(event)} for event in events],
    )


def _taken(store: Store, folded: Folded, state: RunState, name: str, new: RunKey) -> list[Event]:
    step = folded.steps[name]
    events: list[Event] = []
    if step.continued is not None:
        graph_key, sha256 = _copied_graph(
            store, step.continued.graph_key, step.continued.sha256, new, folded, step.continued.steps
        )
        events.append(
            StepContinued(step=name, attempt=0, graph_key=graph_key, sha256=sha256, steps=step.continued.steps)
        )
    if step.committed is not None and step.committed.value_kept:
        events.append(_copied_value(store, step.committed, state.run_id, new))
    return events


def _copied_value(store: Store, committed: StepSucceeded, run_id: str, new: RunKey) -> StepSucceeded:
    value = committed.value
    assert value is not None
    folder = new.folder
    data = moved(value.read(store, committed.step), store, f"{folder}/objects")
    sha256 = hashlib.sha256(data).hexdigest()
    inline, key = committed.inline, committed.value_key
    if key is None:
        inline = base64.b64encode(data).decode()
    else:
        # No driver gives such a name, and two forks that race for an id do not share one.
        key = f"{folder}/values/{path_part(committed.step)}-0-{sha256}.{key.rsplit('.', 1)[-1]}"
        store.create(key, data)
    return dataclasses.replace(committed, attempt=0, sha256=sha256, inline=inline, value_key=key, reused_from=run_id)


def _copied_graph(
    store: Store, key: str, sha256: str, new: RunKey, folded: Folded, names: Sequence[str]
) -> tuple[str, str]:
    graph = read_graph(store, key, sha256)
    folder = f"{new.folder}/objects"
    nodes = [
        dataclasses.replace(
            node,
            arguments=moved(node.arguments, store, folder),
            inputs=tuple(moved(each, store, folder) for each in node.inputs),
            code=folded.code_of(name, node.code),
        )
        for node, name in zip(graph.nodes, names, strict=True)
    ]
    saved = save_graph(Graph(nodes=tuple(nodes), path=graph.path), store, new.folder)
    return saved.graph_key, saved.sha256
