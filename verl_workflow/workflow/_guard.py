"""What to do when a workflow is taken up and the source of its finished steps is no longer what it was."""

from __future__ import annotations

import logging

from verl_workflow.errors import ErrorCode, UserError
from verl_workflow.storage import Store
from verl_workflow.workflow._functions import fingerprint
from verl_workflow.workflow._graph import Graph
from verl_workflow.workflow._metadata import graphs_of
from verl_workflow.workflow._node import load_function
from verl_workflow.workflow._records import StepsReset
from verl_workflow.workflow._state import RunState, read_graph

_log = logging.getLogger(__name__)


def changed_steps(state: RunState, store: Store, on_change: str) -> StepsReset | None:
    """What is to be executed again of the finished steps, such whose error was caught among them, and the digests of
    code that has changed; None: all is as it was.

    Raises:
        UserError(DEFINITION_CHANGED): `on_change` is ``fail``, and there are steps whose code has changed.
    """
    graphs = [(read_graph(store, key, sha256), names) for key, sha256, names in graphs_of(state, store)]
    done = {name for name, step in state.steps.items() if step.committed is not None or step.continued_to is not None}
    done |= _caught(state)
    found = {name: code for graph, names in graphs for name, code in _changed(graph, names, state).items()}
    changed = [name for name in found if name in done]
    # What is executed first, or again, from now on.
    code = {name: digest for name, digest in found.items() if digest and name not in done}
    if not changed:
        return StepsReset(steps=[], code=code) if code else None
    if on_change == "fail":
        raise UserError(
            ErrorCode.DEFINITION_CHANGED,
            f"the code of {len(changed)} finished step(s) is no longer what it was",
            where=state.run_id,
            value=changed,
            remedy="Resume with on_code_change='accept' to keep their values, or 'rerun' to execute them again.",
        )
    if on_change == "accept":
        _log.warning("workflow %s: values are kept of steps whose code has changed: %s", state.run_id, changed)
        return StepsReset(steps=[], code=code) if code else None
    again = sorted(dependents(graphs, state, set(changed)) & done)
    return StepsReset(steps=again, code={name: digest for name, digest in found.items() if digest})


def _caught(state: RunState) -> set[str]:
    """What was executed below a step that has caught an error of it: nothing executes that again by itself."""
    found: set[str] = set()
    waiting = [name for step in state.steps.values() if step.committed is not None for name in step.continued_steps]
    while waiting:
        name = waiting.pop()
        step = state.steps[name]
        if step.attempts:
            found.add(name)
        waiting.extend(step.continued_steps)
    return found


def _changed(graph: Graph, names: list[str], state: RunState) -> dict[str, str]:
    """The steps whose code is another one now, with its digest; that is empty when it cannot be loaded here."""
    found = {}
    known: dict[bytes, str] = {}
    for node, name in zip(graph.nodes, names, strict=True):
        if not node.code:
            # It travels with the workflow.
            continue
        if node.function not in known:
            try:
                known[node.function] = fingerprint(load_function(node.function, graph.path)[0])
            except Exception as error:  # noqa: BLE001 - loading runs the user's own module
                _log.warning("the function of step %s cannot be loaded here: %s", name, error)
                known[node.function] = ""
        step = state.steps.get(name)
        recorded = step.code if step is not None and step.code is not None else node.code
        if known[node.function] != recorded:
            found[name] = known[node.function]
    return found


def dependents(graphs: list[tuple[Graph, list[str]]], state: RunState, steps: set[str]) -> set[str]:
    """The steps and all that depend on their values, through continuations too."""
    followers: dict[str, list[str]] = {}
    for graph, names in graphs:
        for node, name in zip(graph.nodes, names, strict=True):
            for before in node.after:
                followers.setdefault(names[before], []).append(name)
    for name, step in state.steps.items():
        if step.committed is not None:
            # It has caught the error of one of these.
            for other in step.continued_steps:
                followers.setdefault(other, []).append(name)
        if step.continued_to is not None:
            # Whoever waits for it waits for the end of what it has continued to.
            followers.setdefault(step.continued_to, []).extend(followers.get(name, []))
    found: set[str] = set()
    waiting = list(steps)
    while waiting:
        name = waiting.pop()
        if name not in found:
            found.add(name)
            waiting.extend(followers.get(name, []))
    return found
