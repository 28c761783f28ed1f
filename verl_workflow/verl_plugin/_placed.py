"""verl's workers in placement groups that the stage holds, through verl's own classes of pools and replicas."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

# Where among the groups those of a rollout apart stand; the others stand by verl's names of their pools.
ROLLOUT = "rollout"


def held_pools(manager: Any, groups: Mapping[str, Sequence[str]]) -> Any:
    """A ResourcePoolManager as verl has made it, whose pools lie in the held groups (ids in hex); pools of which none
    are held are reserved by verl itself.
    """
    from verl.single_controller.ray import ResourcePoolManager

    class HeldPools(ResourcePoolManager):
        def create_resource_pool(self) -> None:
            # verl's own counts GPUs that are free, of which held ones are none.
            for name, processes in self.resource_pool_spec.items():
                self.resource_pool_dict[name] = _pool(name, processes, self.max_colocate_count, groups.get(name, ()))

    return HeldPools(
        resource_pool_spec=manager.resource_pool_spec,
        mapping=manager.mapping,
        max_colocate_count=manager.max_colocate_count,
    )


def place_replicas(rollout: str, groups: Iterable[str]) -> None:
    """Have replicas of this kind that are apart from the trainer take the held groups, in turn; in this process."""
    from verl.workers.rollout.replica import RolloutReplicaRegistry

    base: Any = RolloutReplicaRegistry.get(rollout)
    left = iter(list(groups))

    class Placed(base):
        async def init_standalone(self) -> None:
            """As verl's own, but for the pool."""
            from verl.single_controller.ray.base import RayWorkerGroup
            from verl.utils.device import get_device_name
            from verl.workers.rollout.replica import RolloutMode

            self.rollout_mode = RolloutMode.STANDALONE
            own = [next(left) for _ in range(self.nnodes)]
            name = f"rollout_pool_{self.replica_rank}{self.name_suffix}"
            self.resource_pool = _pool(name, [self.gpus_per_replica_node] * self.nnodes, 2, own)
            workers = RayWorkerGroup(
                resource_pool=self.resource_pool,
                ray_cls_with_init=self.get_ray_class_with_init_args(),
                bin_pack=False,
                name_prefix=f"rollout_standalone_{self.replica_rank}{self.name_suffix}",
                use_gpu=True,
                device_name=get_device_name(),
            )
            self.workers = workers.workers
            await self.launch_servers()

    Placed.__name__ = Placed.__qualname__ = f"Placed{base.__name__}"
    RolloutReplicaRegistry.register(rollout, lambda: Placed)


def _pool(name: str, processes: Sequence[int], colocated: int, groups: Sequence[str]) -> Any:
    import ray
    from ray.util.placement_group import PlacementGroup
    from verl.single_controller.ray.base import RayResourcePool, sort_placement_group_by_node_ip

    pool = RayResourcePool(
        process_on_nodes=list(processes), use_gpu=True, max_colocate_count=colocated, name_prefix=name
    )
    if groups:
        assert len(groups) == len(processes), f"{len(groups)} groups are held for {len(processes)} nodes of {name}"
        held = [PlacementGroup(ray.PlacementGroupID.from_hex(group)) for group in groups]
        # Ranks stay on their nodes from one attempt to the next.
        pool.pgs = sort_placement_group_by_node_ip(held)
    return pool
