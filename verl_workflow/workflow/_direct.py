"""A graph outside of any workflow: executed by Ray at once, nothing written down."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any


def execute_directly(root: Any) -> Any:
    """The graph's value. Walks without recursion; of the steps' options, only Ray's own count."""
    import ray

    from verl_workflow.workflow._dag import DagView, is_node
    from verl_workflow.workflow._graph import StepNode

    view = DagView()
    refs: dict[int, Any] = {}
    stack = [root]
    while stack:
        node = stack[-1]
        step = view(node)
        assert isinstance(step, StepNode), "there is no input outside of a workflow"
        waiting = [each for each in _nodes_in((step.args, step.kwargs), is_node) if id(each) not in refs]
        if waiting:
            stack.extend(waiting)
            continue
        stack.pop()
        if id(node) not in refs:
            args, kwargs = _replaced((step.args, dict(step.kwargs)), refs, is_node)
            function = _awaited(step.function) if step.options.hosted else step.function
            refs[id(node)] = ray.remote(function).options(**step.options.ray).remote(*args, **kwargs)
    value = ray.get(refs[id(root)])
    # A step that itself returns a continuation.
    return execute_directly(value) if is_node(value) else value


def _awaited(function: Callable[..., Awaitable[Any]]) -> Callable[..., Any]:
    """The same for Ray, whose tasks give no awaitables."""

    def call(*args: Any, **kwargs: Any) -> Any:
        async def result() -> Any:
            return await function(*args, **kwargs)

        return asyncio.run(result())

    return call


def _nodes_in(value: Any, is_node: Any) -> list[Any]:
    if is_node(value):
        return [value]
    parts = value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else ()
    return [node for part in parts for node in _nodes_in(part, is_node)]


def _replaced(value: Any, refs: dict[int, Any], is_node: Any) -> Any:
    if is_node(value):
        return refs[id(value)]
    if not _nodes_in(value, is_node):
        return value
    if isinstance(value, dict):
        return {key: _replaced(part, refs, is_node) for key, part in value.items()}
    parts = [_replaced(part, refs, is_node) for part in value]
    if isinstance(value, list):
        return parts
    # A named tuple takes its parts one by one.
    return type(value)(*parts) if hasattr(value, "_fields") else tuple(parts)
