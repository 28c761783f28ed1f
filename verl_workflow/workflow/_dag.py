"""``ray.dag`` as this library sees it. All use of it is here: it is an interface that Ray may change."""

from __future__ import annotations

from typing import Any

from verl_workflow.workflow._graph import Input, StepNode
from verl_workflow.workflow._options import step_options


class DagView:
    """Understands the nodes of one graph.

    Args:
        args, kwargs: what stands for its ``InputNode``: the one argument itself, or all of them, reached by number or
            name. None: there is nothing it could stand for.
    """

    def __init__(self, args: tuple[Any, ...] | None = None, kwargs: dict[str, Any] | None = None) -> None:
        self._args, self._kwargs = args, kwargs or {}
        self._seen: dict[int, tuple[Any, StepNode | Input]] = {}

    def __call__(self, node: Any) -> StepNode | Input:
        known = self._seen.get(id(node))
        if known is None:
            known = self._seen[id(node)] = node, self._view(node)
        return known[1]

    def _view(self, node: Any) -> StepNode | Input:
        from ray.dag import FunctionNode, InputAttributeNode, InputNode, MultiOutputNode

        if isinstance(node, StepNode):
            return node
        if isinstance(node, FunctionNode):
            options = step_options(node._body, node.get_options())
            return StepNode(node._body, tuple(node.get_args()), node.get_kwargs(), options)
        if isinstance(node, MultiOutputNode):
            return StepNode(_outputs, tuple(node.get_args()), {}, step_options(_outputs, {"num_cpus": 0}))
        if isinstance(node, InputNode):
            return Input(value=self._input())
        if isinstance(node, InputAttributeNode):
            return Input(value=self._attribute(node))
        raise TypeError(f"Unsupported DAG node: {node}. A workflow is made of functions, bound with f.bind(...).")

    def _input(self) -> Any:
        from ray.dag.input_node import DAGInputData

        if self._args is None:
            raise TypeError("This graph has no input: an InputNode stands for the arguments of workflow.run alone.")
        if len(self._args) == 1 and not self._kwargs:
            return self._args[0]
        return DAGInputData(*self._args, **self._kwargs)

    def _attribute(self, node: Any) -> Any:
        from ray.dag.input_node import DAGInputData

        key, value = node._key, self._input()
        by_key = node._accessor_method == "__getitem__" or isinstance(value, DAGInputData)
        return value[key] if by_key else getattr(value, key)


def is_node(thing: Any) -> bool:
    """Whether this stands for a step's value."""
    if isinstance(thing, StepNode):
        return True
    # Asked of every object in an argument: an isinstance check against Ray's class would cost more.
    return type(thing).__module__.startswith("ray.dag") and _is_dag_node(thing)


def _is_dag_node(thing: Any) -> bool:
    from ray.dag import DAGNode

    return isinstance(thing, DAGNode)


def _outputs(*values: Any) -> list[Any]:
    return list(values)
