"""Steps that refer to each other, as a user builds them; and the same at rest, readable without the user's code."""

from __future__ import annotations

import inspect
import pickle
import re
import unicodedata
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from verl_workflow.errors import ErrorCode
from verl_workflow.storage import Store
from verl_workflow.workflow._damage import damaged
from verl_workflow.workflow._functions import at_rest, fingerprint
from verl_workflow.workflow._names import check_name
from verl_workflow.workflow._options import StepOptions
from verl_workflow.workflow._pickling import Objects, dumps, keep
from verl_workflow.workflow._plan import RetryPolicy
from verl_workflow.workflow._values import INLINE_LIMIT


@dataclass(frozen=True, eq=False)
class StepNode:
    """A call of a function, to be made once its arguments are there.

    Attributes:
        args, kwargs: values, other nodes among them: as an argument, a node is replaced by its step's value; deeper in
            an argument, by an object reference to it.
    """

    function: Callable[..., Any]
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    options: StepOptions = field(default_factory=StepOptions)


@dataclass(frozen=True, kw_only=True)
class Node:
    """A step of a graph at rest.

    Attributes:
        name: what it wishes to be called. function: pickle of the function and of what its errors are judged by.
        arguments: pickle of (args, kwargs), in which numbers stand for the nodes of `after` and the `inputs`.
        inputs: pickles of the parts of the run's input that it uses; of a `Kept` for a large one.
        after: numbers of nodes before it in the graph.
        code: digest of the function's source; empty when it is part of `function`.
    """

    name: str
    function: bytes
    arguments: bytes
    inputs: tuple[bytes, ...]
    after: tuple[int, ...]
    options: StepOptions
    code: str


@dataclass(frozen=True, kw_only=True)
class Graph:
    """Nodes, each behind all that it needs; the value of the last one is the graph's.

    Attributes:
        path: folders that Python looked for modules in where the graph was made, for workers that miss them.
    """

    nodes: tuple[Node, ...]
    path: tuple[str, ...] = ()

    def to_bytes(self) -> bytes:
        return pickle.dumps(("verl_workflow graph", 1, self))

    @classmethod
    def from_bytes(cls, data: bytes, key: str) -> Graph:
        """Raises VerlWorkflowError(JOURNAL_DAMAGED) that names `key` unless this is a graph."""
        try:
            name, version, graph = pickle.loads(data)
        except Exception as error:
            raise damaged(key, f"it is no graph of steps ({type(error).__name__}: {error})") from error
        if (name, version) != ("verl_workflow graph", 1) or not isinstance(graph, cls):
            raise damaged(key, "it is no graph of steps that this version knows")
        return graph


@dataclass(frozen=True)
class Direct:
    """Stands, as an argument, for the value of a node of `Node.after`."""

    number: int


@dataclass(frozen=True)
class Given:
    """Stands, as an argument, for one of `Node.inputs`."""

    number: int


@dataclass(frozen=True, kw_only=True)
class Input:
    """What a run is given besides its graph: the part of it that a ``ray.dag`` input node means."""

    value: Any


# Makes a node of the graph from what users write: a StepNode or an Input.
View = Callable[[Any], "StepNode | Input"]


def graph_of(
    root: Any,
    view: View,
    store: Store,
    folder: str,
    *,
    is_node: Callable[[Any], bool],
    defaults: StepOptions | None = None,
    path: tuple[str, ...] = (),
) -> Graph:
    """The graph that ends in `root`. Walks without recursion, so that a chain may have any length.

    Args:
        view, is_node: how nodes of another kind are understood. folder: for what object references refer to.
        defaults: of the step that returned the graph: what its nodes, and its root, inherit.

    Raises:
        TypeError: arguments do not fit a function's signature, or a node is of a kind that is not supported.
        UserError(RUN_ID_INVALID): a step's name cannot be one.
    """
    parts: dict[int, _Part] = {}
    inputs = _Inputs(store, folder)
    order: dict[int, int] = {}
    functions: dict[tuple[int, RetryPolicy], tuple[Any, bytes, str]] = {}
    stack = [root]
    while stack:
        node = stack[-1]
        if id(node) in order:
            stack.pop()
            continue
        part = parts.get(id(node))
        if part is None:
            part = parts[id(node)] = _Part(node, view, is_node, inputs)
            stack.extend(reversed([each for each in part.after if id(each) not in order]))
        else:
            stack.pop()
            order[id(node)] = len(order)
    nodes = []
    for identity in order:
        part = parts[identity]
        options = part.step.options.inherit(defaults, root=identity == id(root))
        policy = options.policy
        known = functions.get((id(part.step.function), policy))
        if known is None:
            from ray import cloudpickle

            function = part.step.function
            # The policy goes along, for it may name the user's classes, which the driver does not know.
            known = function, cloudpickle.dumps((at_rest(function), policy)), fingerprint(function)
            functions[id(function), policy] = known
        nodes.append(
            Node(
                name=_name(part.step),
                function=known[1],
                arguments=part.arguments,
                inputs=tuple(part.inputs),
                after=tuple(order[id(each)] for each in part.after),
                options=options.at_rest(),
                code=known[2],
            )
        )
    return Graph(nodes=tuple(nodes), path=path)


class Names:
    """The names of a run's steps, each given once.

    Args:
        taken: those that are given already.
    """

    def __init__(self, taken: Iterable[str] = ()) -> None:
        self._taken = set(taken)
        self._counts: dict[str, int] = {}

    def give(self, wished: Iterable[str]) -> list[str]:
        """The wished names, with ``_1``, ``_2``, ... behind those that are taken."""
        given = []
        for name in wished:
            found = name
            while found in self._taken:
                self._counts[name] = self._counts.get(name, 0) + 1
                found = f"{name}_{self._counts[name]}"
            self._taken.add(found)
            given.append(found)
        return given


class _Inputs:
    """Parts of a run's input, each pickled once; a large one is written once too, however many nodes use it."""

    def __init__(self, store: Store, folder: str) -> None:
        self.store, self.folder = store, folder
        self.objects: Objects = {}
        # With the value, lest its id be given to another one.
        self._known: dict[int, tuple[Any, bytes]] = {}

    def pickled(self, value: Any) -> bytes:
        known = self._known.get(id(value))
        if known is None:
            data = dumps(value, self.store, self.folder, objects=self.objects)
            if len(data) > INLINE_LIMIT:
                data = pickle.dumps(keep(data, self.store, self.folder))
            known = self._known[id(value)] = value, data
        return known[1]


class _Part:
    """A node with its arguments pickled, and the nodes they hold in the order in which they are met."""

    def __init__(self, node: Any, view: View, is_node: Callable[[Any], bool], inputs: _Inputs) -> None:
        self._view, self._is_node, self._inputs = view, is_node, inputs
        found = view(node)
        if isinstance(found, Input):
            raise TypeError("The output of a workflow has to be a step, not its input.")
        self.step = found
        self.after: list[Any] = []
        self.inputs: list[bytes] = []
        self._numbers: dict[int, tuple[str, int]] = {}
        args = tuple(self._direct(each) for each in found.args)
        kwargs = {name: self._direct(each) for name, each in found.kwargs.items()}
        _check_signature(found.function, args, kwargs)
        self.arguments = dumps((args, kwargs), inputs.store, inputs.folder, self._number, inputs.objects)

    def _direct(self, argument: Any) -> Any:
        if not self._is_node(argument):
            return argument
        numbered = self._number(argument)
        assert numbered is not None
        kind, number = numbered
        return Given(number) if kind == "input" else Direct(number)

    def _number(self, thing: Any) -> tuple[str, int] | None:
        if not self._is_node(thing):
            return None
        known = self._numbers.get(id(thing))
        if known is None:
            viewed = self._view(thing)
            if isinstance(viewed, Input):
                self.inputs.append(self._inputs.pickled(viewed.value))
                known = "input", len(self.inputs) - 1
            else:
                self.after.append(thing)
                known = "step", len(self.after) - 1
            self._numbers[id(thing)] = known
        return known


def _check_signature(function: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    try:
        signature = inspect.signature(function)
    except ValueError:
        # A builtin without a signature: the call itself will tell.
        return
    signature.bind(*args, **kwargs)


def _name(step: StepNode) -> str:
    if step.options.task_id is not None:
        return check_name(step.options.task_id, "task_id", ErrorCode.RUN_ID_INVALID)
    module = getattr(step.function, "__module__", None) or "__anonymous_module__"
    name = getattr(step.function, "__qualname__", "__anonymous_func__")
    plain = unicodedata.normalize("NFKD", name).encode("ascii", "ignore").decode()
    return f"{module}.{re.sub(r'[^A-Za-z0-9_.-]', '', plain)}"[-190:]
