"""Where a training's groups come to lie, on a cluster of a head without CPUs and nodes of several kinds."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from verl_workflow.errors import UserError
from verl_workflow.training._cluster import cluster_nodes, require_fit
from verl_workflow.training._names import StageName
from verl_workflow.training._nodes import Group, Need, Where
from verl_workflow.training._places import Places

NAME = StageName(run_id="placed", incarnation="0123456789abcdef", stage="train")


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    """Two nodes of a kind, of which one has a label, and one of another."""
    import ray
    from ray.cluster_utils import Cluster

    found = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False})
    old, fast = {"accelerator_type:A100": 1}, {"accelerator_type:H200": 1}
    found.add_node(num_cpus=12, num_gpus=2, resources=old, labels={"zone": "a"})
    found.add_node(num_cpus=12, num_gpus=2, resources=fast, labels={"zone": "a"})
    found.add_node(num_cpus=12, num_gpus=2, resources=fast, labels={"zone": "b"})
    ray.init(address=found.address, log_to_driver=False)
    try:
        yield found
    finally:
        ray.shutdown()
        found.shutdown()


@pytest.fixture
def places(cluster: Any) -> Iterator[Places]:
    found = Places(NAME, "1.1", 60.0)
    yield found
    found.release()


def nodes_of(groups: list[str]) -> list[Any]:
    """The node of each group, as the stage knows it."""
    import ray

    table = ray.util.placement_group_table()
    known = {node.id: node for node in cluster_nodes()}
    return [known[next(iter(set(table[group]["bundles_to_node_id"].values())))] for group in groups]


def test_groups_lie_where_accelerator_and_labels_say(places: Places) -> None:
    trainer = Group(gpus=2, where=Where(accelerator="H200", labels={"zone": "b"}))
    rollout = Group(pool="rollout", part="the rollout", gpus=2, cpus_a_gpu=2, where=Where(accelerator="A100"))
    need = Need(groups=(trainer, rollout), dealt=3, single=1)
    require_fit(need, cluster_nodes())
    found = places.reserve(need, lambda _: None, timeout=120)
    [here], [there] = nodes_of(found["global_pool"]), nodes_of(found["rollout"])
    assert (here.accelerators, here.labels["zone"]) == (("H200",), "b")
    assert there.accelerators == ("A100",)


def test_each_group_lies_on_one_node_and_two_do_not_share_it(places: Places) -> None:
    need = Need(groups=(Group(gpus=2), Group(gpus=2), Group(gpus=2)))
    found = nodes_of(places.reserve(need, lambda _: None, timeout=120)["global_pool"])
    assert len({node.id for node in found}) == 3


def test_what_no_node_can_ever_hold_is_told_at_once(cluster: Any) -> None:
    nodes = cluster_nodes()
    assert sum(not node.cpus for node in nodes) == 1
    with pytest.raises(UserError, match="has A100 GPUs, not B200") as caught:
        require_fit(Need(groups=(Group(gpus=1, where=Where(accelerator="B200")),)), nodes)
    assert "has no GPUs, not B200" in str(caught.value)
    with pytest.raises(UserError, match="bundle 3 of 3 lacks a GPU"):
        require_fit(Need(groups=(Group(gpus=3),)), nodes)


def test_a_need_that_is_above_what_is_there_is_met_by_a_node_that_comes(cluster: Any, places: Places) -> None:
    seen: list[Any] = []
    need = Need(groups=(Group(gpus=4),), dealt=4, single=1)

    def report(progress: Any) -> None:
        if not seen:
            cluster.add_node(num_cpus=16, num_gpus=4)
        seen.append(progress["phase"])

    [node] = nodes_of(places.reserve(need, report, timeout=240)["global_pool"])
    assert node.gpus == 4
    assert "bundle 3 of 4 lacks a GPU" in seen[0]
