from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest

from verl_workflow.training._nodes import Group, Need, Node, Where, fit, shortage


def node(name: str, cpus: float, gpus: float, **changes: Any) -> Node:
    made = Node(name=name, cpus=cpus, gpus=gpus, free_cpus=cpus, free_gpus=gpus, id=name)
    return replace(made, **({"resources": frozenset({"CPU"} if cpus else set())} | changes))


def of(name: str, accelerator: str, labels: Mapping[str, str] | None = None, **changes: Any) -> Node:
    """A node with eight GPUs of a type."""
    resources = frozenset({"CPU", "GPU", f"accelerator_type:{accelerator}"})
    return node(name, 96, 8, resources=resources, labels=labels or {}, **changes)


def need(*gpus: int, dealt: int = 0, single: int = 0, where: Where | None = None, **changes: Any) -> Need:
    """Groups of so many GPUs."""
    groups = tuple(Group(gpus=each, where=where or Where()) for each in gpus)
    return Need(groups=groups, dealt=dealt, single=single, **changes)


HEAD = node("head", 0, 0)
BIG, SMALL = node("big", 96, 8), node("small", 16, 4)


@pytest.mark.parametrize(
    ("wanted", "nodes"),
    [
        (need(8, dealt=8, single=1), [HEAD, BIG]),
        (need(4, 4, dealt=8, single=1), [BIG, node("another", 16, 4)]),
        (need(4, 4, dealt=8, single=1), [BIG]),
        # The controller finds its CPU on another node.
        (need(4, single=1), [node("tight", 12, 4), node("cpus", 1, 0)]),
        # Smaller nodes are filled first.
        (need(4, 4), [node("big", 24, 4), node("exact", 12, 4)]),
        # The first choice for the smaller group would leave no place for the larger one.
        (Need(groups=(Group(gpus=2), Group(gpus=3))), [node("a", 9, 3), node("b", 6, 2)]),
        (need(1, dealt=8, single=1, dealt_over=None), [node("a", 12, 1)]),
    ],
)
def test_what_fits_lacks_nothing(wanted: Need, nodes: list[Node]) -> None:
    assert shortage(wanted, nodes, idle=True) is None
    assert shortage(wanted, nodes, idle=False) is None


@pytest.mark.parametrize(
    ("wanted", "nodes", "said"),
    [
        (
            need(8),
            [SMALL, node("other", 64, 4)],
            "8 bundles of 1 GPU and 3 CPUs for the trainer on one node fits nowhere: "
            "node small has 16 CPUs and 4 GPUs: bundle 5 of 8 lacks a GPU; "
            "node other has 64 CPUs and 4 GPUs: bundle 5 of 8 lacks a GPU",
        ),
        (
            need(4),
            [node("a", 8, 4)],
            "4 bundles of 1 GPU and 3 CPUs for the trainer on one node fits nowhere: "
            "node a has 8 CPUs and 4 GPUs: bundle 3 of 4 lacks 1 CPU",
        ),
        (
            need(1),
            [node("a", 1, 0)],
            "1 bundle of 1 GPU and 3 CPUs for the trainer on one node fits nowhere: "
            "node a has 1 CPUs and 0 GPUs: bundle 1 of 1 lacks a GPU and 2 CPUs",
        ),
        (
            need(8, 8),
            [BIG, SMALL],
            "group 2 of 2, 8 bundles of 1 GPU and 3 CPUs for the trainer on one node fits nowhere: "
            "node small has 16 CPUs and 4 GPUs: bundle 5 of 8 lacks a GPU; "
            "node big has 72 CPUs and 0 GPUs: bundle 1 of 8 lacks a GPU "
            "(what earlier groups and the transfer queue take is off)",
        ),
        (
            need(8, where=Where(accelerator="H200")),
            [of("old", "A100"), HEAD],
            "8 bundles of 1 GPU and 3 CPUs for the trainer on one node (H200) fits nowhere: "
            "node head has no GPUs, not H200; node old has A100 GPUs, not H200",
        ),
        (
            need(8, where=Where(labels={"zone": "a", "market": "!spot"})),
            [of("b", "H200", {"zone": "b"}), of("none", "H200"), of("spot", "H200", {"zone": "a", "market": "spot"})],
            "8 bundles of 1 GPU and 3 CPUs for the trainer on one node (zone=a, market=!spot) fits nowhere: "
            "node b has the label zone=b, not zone=a; node none has no label zone, not zone=a; "
            "node spot has the label market=spot, not market=!spot",
        ),
        (need(1), [], "1 bundle of 1 GPU and 3 CPUs for the trainer on one node fits nowhere: there is no node"),
        (
            need(1, single=12),
            [node("a", 8, 1)],
            "15 CPUs are needed and the cluster has 8 (3 beside the GPUs, and 12 for verl's actors without a GPU, of "
            "which 7 find no place)",
        ),
        (
            need(1, single=2),
            [node("a", 3.5, 1), node("b", 1.5, 0)],
            "5 CPUs are needed and the cluster has 5 (3 beside the GPUs, and 2 for verl's actors without a GPU, of "
            "which 1 find no place)",
        ),
    ],
)
def test_what_is_missing_is_told_bundle_by_bundle_and_node_by_node(wanted: Need, nodes: list[Node], said: str) -> None:
    assert shortage(wanted, nodes, idle=True) == said


def test_what_others_use_is_missing_only_for_now() -> None:
    busy = node("10.0.0.3", 16, 4, free_cpus=2, free_gpus=3)
    assert shortage(need(4), [busy], idle=True) is None
    assert shortage(need(4), [busy], idle=False) == (
        "4 bundles of 1 GPU and 3 CPUs for the trainer on one node fits nowhere: "
        "node 10.0.0.3 has 2 of 16 CPUs and 3 of 4 GPUs free: bundle 1 of 4 lacks 1 CPU"
    )


def test_storage_units_are_dealt_out_over_the_nodes_by_their_ids_whether_they_have_room_or_not() -> None:
    nodes = [node("roomy", 64, 8, id="2"), node("full", 24, 8, id="1")]
    assert shortage(need(8, dealt=8), nodes, idle=True) is None
    said = shortage(need(8, 8, dealt=3), nodes, idle=True)
    assert "node full has 22 CPUs and 8 GPUs: bundle 8 of 8 lacks 2 CPUs" in str(said)
    said = shortage(need(dealt=9), [node("roomy", 64, 8, id="2"), node("tiny", 4, 0, id="1")], idle=True)
    assert str(said).startswith("node tiny has 4 CPUs, and 5 of the transfer queue's 9 storage units")
    assert "num_data_storage_units" in str(said)


def test_nodes_without_cpus_get_no_storage_unit_unless_verl_is_left_to_itself() -> None:
    nodes = [node("0-head", 0, 0), node("worker", 12, 1)]
    assert shortage(need(1, dealt=8, single=1), nodes, idle=True) is None
    said = shortage(need(1, dealt=8, single=1, dealt_over=None), nodes, idle=True)
    assert str(said).startswith("node 0-head has 0 CPUs, and 4 of the transfer queue's 8 storage units")


def test_only_some_nodes_hold_storage_units_where_a_resource_says_so() -> None:
    nodes = [node("a", 3, 1), node("b", 8, 0, resources=frozenset({"CPU", "storage"}))]
    assert shortage(need(1, dealt=8, dealt_over="storage"), nodes, idle=True) is None
    assert shortage(need(1, dealt=8, dealt_over="disk"), nodes, idle=True) == (
        "no node has disk, where the transfer queue's 8 storage units go"
    )


def test_each_group_gets_a_node_that_will_do() -> None:
    trainer = Group(gpus=8, where=Where(accelerator="H200"))
    rollout = Group(pool="rollout", part="the rollout", gpus=8, cpus_a_gpu=2)
    nodes = [of("fast", "H200"), of("slow", "A100")]
    assert fit(Need(groups=(rollout, trainer)), nodes, idle=True).nodes == ("slow", "fast")
    said = shortage(Need(groups=(rollout, trainer)), [of("fast", "H200"), SMALL], idle=True)
    assert "for the rollout on one node fits nowhere" in str(said)
    assert "node small has 16 CPUs and 4 GPUs: bundle 5 of 8 lacks a GPU" in str(said)


def test_a_large_cluster_is_told_in_short_and_searched_in_no_time() -> None:
    nodes = [node(f"n{number}", 96, 8) for number in range(200)]
    assert len(set(fit(need(*[8] * 200), nodes, idle=True).nodes)) == 200
    said = str(shortage(need(*[8] * 201), nodes, idle=True))
    assert said.startswith("group 201 of 201, 8 bundles")
    assert said.endswith("194 further nodes have no more (what earlier groups and the transfer queue take is off)")


@pytest.mark.parametrize(
    ("selector", "value", "fits"),
    [
        ("a", "a", True),
        ("a", "b", False),
        ("a", None, False),
        ("!a", "b", True),
        ("!a", None, True),
        ("!a", "a", False),
        ("in(a, b)", "b", True),
        ("in(a,b)", "c", False),
        ("!in(a, b)", "a", False),
        ("!in(a, b)", None, True),
    ],
)
def test_labels_are_compared_as_ray_does(selector: str, value: str | None, fits: bool) -> None:
    labels = {} if value is None else {"zone": value}
    assert (Where(labels={"zone": selector}).lacks(of("n", "H200", labels)) is None) is fits


def test_a_need_is_told_in_short() -> None:
    assert str(need(8, 8, dealt=8, single=1)) == "16 GPUs and 57 CPUs in 2 groups"
    assert str(need(1, dealt=1, single=1)) == "1 GPUs and 5 CPUs"
