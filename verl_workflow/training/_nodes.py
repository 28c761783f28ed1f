"""Whether a training fits on a cluster's nodes, and in words what is missing where. Knows nothing of Ray."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

_NAMED_NODES = 6
# Nobody has so many groups that are unlike each other; where it ends, Ray finds a place or says nothing.
_TRIES = 20_000


@dataclass(frozen=True, kw_only=True)
class Node:
    """A node: its name for people, what it has, and what of that is unused.

    Attributes:
        id: Ray's, by which verl orders nodes. labels: Ray's labels. resources: names of what it has any of, among
            them ``accelerator_type:H200``.
    """

    name: str
    cpus: float
    gpus: float
    free_cpus: float
    free_gpus: float
    id: str = ""
    labels: Mapping[str, str] = field(default_factory=dict)
    resources: frozenset[str] = frozenset({"CPU"})

    @property
    def accelerators(self) -> tuple[str, ...]:
        """Types of its GPUs."""
        return tuple(sorted(name.partition(":")[2] for name in self.resources if name.startswith("accelerator_type:")))


@dataclass(frozen=True, kw_only=True)
class Where:
    """Which nodes will do: those with GPUs of a type, and with labels (Ray's forms of a selector)."""

    accelerator: str | None = None
    labels: Mapping[str, str] = field(default_factory=dict)

    def lacks(self, node: Node) -> str | None:
        """Why the node will not do, or None when it will."""
        if self.accelerator is not None and self.accelerator not in node.accelerators:
            return f"has {', '.join(node.accelerators) or 'no'} GPUs, not {self.accelerator}"
        for key, selector in self.labels.items():
            value = node.labels.get(key)
            if not _selects(selector, value):
                return f"has {'no label ' + key if value is None else f'the label {key}={value}'}, not {key}={selector}"
        return None

    def __str__(self) -> str:
        wanted = [self.accelerator] if self.accelerator else []
        return ", ".join([*wanted, *(f"{key}={selector}" for key, selector in self.labels.items())])


@dataclass(frozen=True, kw_only=True)
class Group:
    """Bundles of one GPU each, with CPUs, that must lie on one node.

    Attributes:
        pool: verl's name of what it belongs to. part: for people, whose it is.
        gpus: number of bundles. cpus_a_gpu: CPUs of a bundle.
    """

    pool: str = "global_pool"
    part: str = "the trainer"
    gpus: int
    cpus_a_gpu: int = 3
    where: Where = Where()

    @property
    def cpus(self) -> int:
        return self.gpus * self.cpus_a_gpu


@dataclass(frozen=True, kw_only=True)
class Need:
    """What verl's actors hold while they train.

    Attributes:
        groups: of GPUs and the CPUs beside them.
        dealt: storage units of the transfer queue, one CPU each: verl deals them out over all nodes that have some of
            the resource `dealt_over`, in the order of their ids, whether they have room or not.
        single: further actors of one CPU each, wherever there is one.
    """

    groups: tuple[Group, ...] = ()
    dealt: int = 0
    single: int = 0
    dealt_over: str | None = "CPU"

    @property
    def gpus(self) -> int:
        return sum(group.gpus for group in self.groups)

    @property
    def cpus(self) -> int:
        return sum(group.cpus for group in self.groups) + self.dealt + self.single

    def __str__(self) -> str:
        parts = [f"{self.gpus} GPUs"] if self.groups else []
        nodes = f" in {len(self.groups)} groups" if len(self.groups) > 1 else ""
        return f"{' and '.join([*parts, f'{self.cpus} CPUs'])}{nodes}"


@dataclass(frozen=True, kw_only=True)
class Fit:
    """Where groups would go.

    Attributes:
        nodes: ids of nodes, one for each group; empty when it does not fit. missing: then what is missing, in words.
    """

    nodes: tuple[str, ...] = ()
    missing: str | None = None


def fit(need: Need, nodes: Sequence[Node], *, idle: bool) -> Fit:
    """Find a place for everything, or say what is missing and where.

    Args:
        idle: judge by what the nodes have, as if nothing ran; else by what is unused.
    """
    left = {
        node.name: (node.cpus, node.gpus) if idle else (node.free_cpus, node.free_gpus)
        for node in sorted(nodes, key=lambda node: (node.gpus, node.cpus, node.name))
    }
    told = _Teller(nodes={node.name: node for node in nodes}, idle=idle)
    if need.dealt:
        dealt = _dealt(need, nodes)
        if not dealt:
            return Fit(missing=told.nowhere_to_deal(need))
        for name, units in dealt.items():
            if left[name][0] < units:
                return Fit(missing=told.too_few_for_units(need, name, units, left[name][0]))
            left[name] = (left[name][0] - units, left[name][1])
    groups = need.groups
    # Those that will not do with every node come first, and large ones.
    order = sorted(range(len(groups)), key=lambda index: (not str(groups[index].where), -groups[index].gpus))
    search = _Search(need=need, nodes=told.nodes, order=order)
    places = search.run(left)
    if places is not None:
        return Fit(nodes=tuple(told.nodes[places[index]].id for index in range(len(need.groups))))
    if search.tries > _TRIES:
        return Fit(nodes=tuple("" for _ in need.groups))
    return Fit(missing=told.no_place(need, order, search.greedy(left)))


def shortage(need: Need, nodes: Sequence[Node], *, idle: bool) -> str | None:
    """As `fit`: what is missing, or None when it fits."""
    return fit(need, nodes, idle=idle).missing


Left = Mapping[str, tuple[float, float]]


@dataclass(kw_only=True)
class _Search:
    """Tries places for groups, the node with the least to spare first, so that larger ones stay for larger groups."""

    need: Need
    nodes: Mapping[str, Node]
    order: Sequence[int]
    tries: int = 0

    def run(self, left: Left, at: int = 0) -> dict[int, str] | None:
        """The node's name for each group, or None."""
        self.tries += 1
        if self.tries > _TRIES:
            return None
        if at == len(self.order):
            return {} if _singles(left) >= self.need.single else None
        index, seen = self.order[at], set()
        for name in self._fitting(index, left):
            node, alike = self.nodes[name], left[name]
            # Of nodes that are alike one stands for all.
            kind = (alike, node.resources, tuple(sorted(node.labels.items())) if self._labels() else ())
            if kind in seen:
                continue
            seen.add(kind)
            found = self.run(self._without(index, left, name), at + 1)
            if found is not None:
                return {index: name, **found}
        return None

    def greedy(self, left: Left) -> tuple[int, Left]:
        """How far the first choices come: the place in the order of the group that finds none, and what is left."""
        for at, index in enumerate(self.order):
            fitting = self._fitting(index, left)
            if not fitting:
                return at, left
            left = self._without(index, left, fitting[0])
        return len(self.order), left

    def _labels(self) -> bool:
        return any(group.where.labels for group in self.need.groups)

    def _fitting(self, index: int, left: Left) -> list[str]:
        group = self.need.groups[index]
        names = [
            name
            for name, (cpus, gpus) in left.items()
            if gpus >= group.gpus and cpus >= group.cpus and group.where.lacks(self.nodes[name]) is None
        ]
        return sorted(names, key=lambda name: (left[name][1], left[name][0]))

    def _without(self, index: int, left: Left, name: str) -> Left:
        group, (cpus, gpus) = self.need.groups[index], left[name]
        return {**left, name: (cpus - group.cpus, gpus - group.gpus)}


@dataclass(frozen=True, kw_only=True)
class _Teller:
    """Says what is missing, so that a person can act."""

    nodes: Mapping[str, Node]
    idle: bool

    def no_place(self, need: Need, order: Sequence[int], reached: tuple[int, Left]) -> str:
        at, left = reached
        if at == len(order):
            return self._too_few_singles(need, left)
        group = need.groups[order[at]]
        number = f"group {at + 1} of {len(order)}, " if len(order) > 1 else ""
        where = f" ({group.where})" if str(group.where) else ""
        bundles = "1 bundle" if group.gpus == 1 else f"{group.gpus} bundles"
        what = f"{number}{bundles} of 1 GPU and {group.cpus_a_gpu} CPUs for {group.part} on one node{where}"
        gone = " (what earlier groups and the transfer queue take is off)" if at or need.dealt else ""
        return f"{what} fits nowhere: {'; '.join(self._node_by_node(group, left)) or 'there is no node'}{gone}"

    def too_few_for_units(self, need: Need, name: str, units: int, cpus: float) -> str:
        return (
            f"{self._has(name, cpus, None)}, and {units} of the transfer queue's {need.dealt} storage units, of one "
            "CPU each, go there, as verl deals them out over the nodes (fewer: "
            "transfer_queue.backend.SimpleStorage.num_data_storage_units; only some nodes: required_node_resource)"
        )

    def nowhere_to_deal(self, need: Need) -> str:
        return f"no node has {need.dealt_over}, where the transfer queue's {need.dealt} storage units go"

    def _too_few_singles(self, need: Need, left: Left) -> str:
        total = sum(node.cpus if self.idle else node.free_cpus for node in self.nodes.values())
        beside = sum(group.cpus for group in need.groups)
        missing = need.single - _singles(left)
        held = f"{beside} beside the GPUs, and " if beside else ""
        return (
            f"{need.cpus} CPUs are needed and the cluster has {total:g}{'' if self.idle else ' free'} ({held}"
            f"{need.dealt + need.single} for verl's actors without a GPU, of which {missing} find no place)"
        )

    def _node_by_node(self, group: Group, left: Left) -> Iterator[str]:
        said = []
        for name, (cpus, gpus) in left.items():
            if wrong := group.where.lacks(self.nodes[name]):
                said.append((-1, f"node {name} {wrong}"))
                continue
            whole = int(max(0, min(gpus, cpus // group.cpus_a_gpu)))
            lacks = " and ".join(
                [
                    *(["a GPU"] if gpus < whole + 1 else []),
                    *(_cpus_for(group, cpus - whole * group.cpus_a_gpu)),
                ]
            )
            said.append((whole, f"{self._has(name, cpus, gpus)}: bundle {whole + 1} of {group.gpus} lacks {lacks}"))
        said.sort(key=lambda pair: -pair[0])
        yield from (text for _, text in said[:_NAMED_NODES])
        if len(said) > _NAMED_NODES:
            yield f"{len(said) - _NAMED_NODES} further nodes have no more"

    def _has(self, name: str, cpus: float, gpus: float | None) -> str:
        node = self.nodes[name]
        if self.idle:
            return f"node {name} has {cpus:g} CPUs" + ("" if gpus is None else f" and {gpus:g} GPUs")
        return f"node {name} has {max(cpus, 0):g} of {node.cpus:g} CPUs" + (
            " free" if gpus is None else f" and {gpus:g} of {node.gpus:g} GPUs free"
        )


def _cpus_for(group: Group, cpus: float) -> list[str]:
    lacking = group.cpus_a_gpu - cpus
    return [f"{lacking:g} CPU{'' if lacking == 1 else 's'}"] if lacking > 0 else []


def _dealt(need: Need, nodes: Sequence[Node]) -> Mapping[str, int]:
    """How many storage units go to which node."""
    able = [
        node.name
        for node in sorted(nodes, key=lambda node: node.id)
        if need.dealt_over is None or need.dealt_over in node.resources
    ]
    return Counter(able[unit % len(able)] for unit in range(need.dealt)) if able else {}


def _singles(left: Left) -> int:
    return sum(int(max(cpus, 0)) for cpus, _ in left.values())


def _selects(selector: str, value: str | None) -> bool:
    """Ray's rules: a label that is missing is unlike any value."""
    negated = selector.startswith("!")
    listed = re.fullmatch(r"in\((.*)\)", selector.removeprefix("!"))
    values = [part.strip() for part in listed.group(1).split(",")] if listed else [selector.removeprefix("!")]
    return (value in values) is not negated
