"""A step of a graph: from its form at rest to something a driver can run, and what happens where it runs."""

from __future__ import annotations

import contextlib
import contextvars
import functools
import hashlib
import sys
from collections.abc import Awaitable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from verl_workflow.storage import Store
from verl_workflow.workflow._attempt import Continued, own_errors
from verl_workflow.workflow._functions import loaded
from verl_workflow.workflow._graph import Direct, Given, Graph, Node, graph_of
from verl_workflow.workflow._pickling import Kept, loads
from verl_workflow.workflow._plan import RetryPolicy, Step, StepContext
from verl_workflow.workflow._values import Codec

_CURRENT: contextvars.ContextVar[StepContext | None] = contextvars.ContextVar("verl_workflow_step", default=None)
_STORE: contextvars.ContextVar[Store | None] = contextvars.ContextVar("verl_workflow_store", default=None)


def steps_of(graph: Graph, names: Sequence[str], store: Store) -> list[Step]:
    """The graph's nodes under the names they have in the run."""
    steps = []
    for node, name in zip(graph.nodes, names, strict=True):
        options = node.options
        resources = dict(options.ray)
        after = tuple(names[number] for number in node.after)
        steps.append(
            Step(
                name=name,
                call=NodeCall(node=node, after=after, path=graph.path, store=store),
                after=after,
                retry=options.policy,
                start_to_close_s=options.timeout_s,
                heartbeat_s=options.heartbeat_timeout_s,
                num_cpus=resources.pop("num_cpus", 1.0),
                num_gpus=resources.pop("num_gpus", 0.0),
                options=resources,
                codec=Codec.PICKLE,
                kept=options.checkpoint is not False,
                catches=bool(options.catch_exceptions),
                hosted=options.hosted,
                apart=options.apart,
            )
        )
    return steps


@dataclass(frozen=True, kw_only=True)
class NodeCall:
    """A step's `call`."""

    node: Node
    after: tuple[str, ...]
    path: tuple[str, ...]
    store: Store

    def __call__(self, context: StepContext) -> Any:
        if self.node.options.hosted:
            return self._hosted(context)
        with self._prepared(context) as (function, args, kwargs):
            with own_errors():
                result = function(*args, **kwargs)
            return self._result(result, context)

    def may_retry(self, error: BaseException) -> bool | None:
        """Whether the step's policy takes this class of errors for one that may pass; None: it names none."""
        policy = load_function(self.node.function, self.path)[1]
        return None if policy.takes(error) and policy.on is None else policy.takes(error)

    async def _hosted(self, context: StepContext) -> Any:
        with self._prepared(context) as (function, args, kwargs):
            with own_errors():
                waiting: Awaitable[Any] = function(*args, **kwargs)
                result = await waiting
            return self._result(result, context)

    @contextlib.contextmanager
    def _prepared(self, context: StepContext) -> Iterator[tuple[Any, tuple[Any, ...], dict[str, Any]]]:
        function, _ = load_function(self.node.function, self.path)

        def given(number: int) -> Any:
            found = loads(self.node.inputs[number], self.store)
            return found.load(self.store) if isinstance(found, Kept) else found

        def numbered(kind: str, number: int) -> Any:
            if kind == "input":
                return given(number)
            import ray

            # As with Ray's own tasks: what lies deeper in an argument arrives as a reference.
            return ray.put(context.inputs[self.after[number]])

        def direct(argument: Any) -> Any:
            if isinstance(argument, Direct):
                return context.inputs[self.after[argument.number]]
            if isinstance(argument, Given):
                argument = given(argument.number)
            return _dereferenced(argument)

        args, kwargs = loads(self.node.arguments, self.store, numbered)
        token, store = _CURRENT.set(context), _STORE.set(self.store)
        try:
            yield function, tuple(map(direct, args)), {name: direct(each) for name, each in kwargs.items()}
        finally:
            _CURRENT.reset(token)
            _STORE.reset(store)

    def _result(self, result: Any, context: StepContext) -> Any:
        from verl_workflow.workflow._dag import DagView, is_node

        if not is_node(result):
            return (result, None) if self.node.options.catch_exceptions else result
        folder = context.run.folder
        graph = graph_of(
            result,
            DagView(),
            self.store,
            f"{folder}/objects",
            is_node=is_node,
            defaults=self.node.options,
            path=self.path,
        )
        return save_graph(graph, self.store, folder)


def save_graph(graph: Graph, store: Store, folder: str) -> Continued:
    """Write a graph down in the folder of a run; the same one is written once."""
    data = graph.to_bytes()
    sha256 = hashlib.sha256(data).hexdigest()
    key = f"{folder}/graphs/{sha256}.pkl"
    store.create(key, data)
    return Continued(graph_key=key, sha256=sha256, names=tuple(node.name for node in graph.nodes))


def current() -> StepContext:
    """The attempt that the calling function is part of.

    Raises:
        RuntimeError: it is called outside of a workflow's step.
    """
    found = _CURRENT.get()
    if found is None:
        raise RuntimeError("workflow.current() is for functions that a workflow executes; this is none of them.")
    return found


def current_store() -> Store:
    """The storage of the workflow that the calling function is executed by. Raises as `current`."""
    current()
    found = _STORE.get()
    assert found is not None
    return found


def in_step() -> bool:
    """Whether a workflow's step is being executed here."""
    return _CURRENT.get() is not None


@functools.lru_cache(maxsize=256)
def load_function(data: bytes, path: tuple[str, ...]) -> tuple[Any, RetryPolicy]:
    """The function and its policy; loaded once in a process, like a remote function of Ray's."""
    from ray import cloudpickle

    # What lies beside the script that built the graph comes first, whoever has started the cluster's workers.
    sys.path[:] = [*path, *(folder for folder in sys.path if folder not in path)]
    found = cloudpickle.loads(data)
    function, policy = found
    return loaded(function), policy


def _dereferenced(argument: Any) -> Any:
    if type(argument).__name__ != "ObjectRef":
        return argument
    import ray

    return ray.get(argument) if isinstance(argument, ray.ObjectRef) else argument
