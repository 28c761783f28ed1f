"""verl's own classes of pools and replicas in groups that are held; where Ray would be asked, nobody is."""

from __future__ import annotations

import asyncio
from typing import Any, ClassVar

import pytest
from omegaconf import OmegaConf

from verl_workflow.verl_plugin._placed import held_pools, place_replicas
from verl_workflow.verl_plugin._trainers import _supervised

HELD = [f"{number:036x}" for number in range(1, 7)]


@pytest.fixture(autouse=True)
def unsorted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Groups stay in their order; Ray would be asked on which nodes they lie."""
    monkeypatch.setattr("verl.single_controller.ray.base.sort_placement_group_by_node_ip", lambda groups: list(groups))


def manager(**pools: list[int]) -> Any:
    from verl.single_controller.ray import ResourcePoolManager

    return ResourcePoolManager(resource_pool_spec=pools, mapping={"actor": "global_pool"})


def ids(pool: Any) -> list[str] | None:
    return None if pool.pgs is None else [group.id.hex() for group in pool.pgs]


def test_pools_lie_in_the_groups_that_are_held_for_them() -> None:
    found = held_pools(
        manager(global_pool=[8, 8], reward_pool=[2]), {"global_pool": HELD[:2], "reward_pool": HELD[2:3]}
    )
    # verl's own would count free GPUs here, and find none.
    found.create_resource_pool()
    pools = found.resource_pool_dict
    assert ids(pools["global_pool"]) == HELD[:2]
    assert ids(pools["reward_pool"]) == HELD[2:3]
    assert found.get_resource_pool("actor") is pools["global_pool"]
    assert (pools["global_pool"].store, pools["global_pool"].max_colocate_count) == ([8, 8], 3)
    assert found.get_n_gpus() == 18


def test_a_pool_for_which_nothing_is_held_is_verls_own_affair() -> None:
    found = held_pools(manager(global_pool=[1], teacher_pool=[1]), {"global_pool": HELD[:1]})
    found.create_resource_pool()
    assert ids(found.resource_pool_dict["teacher_pool"]) is None


def test_groups_and_nodes_must_agree() -> None:
    with pytest.raises(AssertionError, match="2 groups are held for 1 nodes of global_pool"):
        held_pools(manager(global_pool=[8]), {"global_pool": HELD[:2]}).create_resource_pool()


class Replica:
    """As much of verl's replica as takes its place."""

    gpus_per_replica_node, nnodes, name_suffix = 4, 2, ""
    made: ClassVar[list[Any]] = []

    def __init__(self, rank: int) -> None:
        self.replica_rank = rank
        self.workers: list[Any] = []
        self.resource_pool: Any = None

    def get_ray_class_with_init_args(self) -> str:
        return "worker"

    async def launch_servers(self) -> None:
        self.launched = True


def test_replicas_that_are_apart_take_the_held_groups_in_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    from verl.workers.rollout.replica import RolloutMode, RolloutReplicaRegistry

    class Workers:
        def __init__(self, resource_pool: Any, **_: Any) -> None:
            self.workers = ids(resource_pool) or []

    monkeypatch.setattr("verl.single_controller.ray.base.RayWorkerGroup", Workers)
    monkeypatch.setattr(RolloutReplicaRegistry, "_registry", {"mine": lambda: Replica})
    place_replicas("mine", HELD[:4])
    placed: Any = RolloutReplicaRegistry.get("mine")
    replicas = [placed(2), placed(3)]
    for replica in replicas:
        asyncio.run(replica.init_standalone())
    assert [replica.workers for replica in replicas] == [HELD[:2], HELD[2:4]]
    assert all(replica.launched and replica.rollout_mode is RolloutMode.STANDALONE for replica in replicas)
    assert replicas[0].resource_pool.store == [4, 4]
    # One CPU for the worker, and one for what sends it its weights.
    assert replicas[0].resource_pool.max_colocate_count == 2


class Trainer:
    """As much of verl's trainer as makes its pools."""

    def __init__(self, config: Any) -> None:
        self.config = config
        self._setup()

    def _setup(self) -> None:
        self._init_resource_pool_mgr()
        self.resource_pool_manager.create_resource_pool()

    def _init_resource_pool_mgr(self) -> None:
        self.resource_pool_manager: Any = manager(global_pool=[1])


@pytest.mark.parametrize("mode", ["sync", "colocate_async", "separate_async"])
def test_each_of_verls_trainers_uses_what_the_stage_holds(mode: str) -> None:
    supervised = {"owner": "1.1", "checkpoints": "/nowhere", "groups": {"global_pool": HELD[:1]}}
    settings = {"trainer_mode": f"supervised_{mode}", "supervised": supervised}
    trainer = _supervised(mode, Trainer)(OmegaConf.create({"trainer": {"v1": settings}}))
    assert ids(trainer.resource_pool_manager.resource_pool_dict["global_pool"]) == HELD[:1]
