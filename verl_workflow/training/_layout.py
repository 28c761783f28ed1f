"""What a training takes of a cluster, from verl's settings: groups of GPUs by pool, and CPUs beside them.

Seen in verl 0.9.1: `PPOTrainer._init_resource_pool_mgr` makes a group for each node of the trainer, of the reward
model's pool and of the teachers'; each replica of a rollout apart makes its own (`RolloutReplica.init_standalone`).
The reference, the critic and, unless it is apart, the rollout work in the trainer's processes and on its GPUs.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from verl_workflow.spec._placement import Placement, Pool
from verl_workflow.training._nodes import Group, Need, Where

TRAINER, REWARD, TEACHER, ROLLOUT = "global_pool", "reward_pool", "teacher_pool", "rollout"
_ROLLOUT = "actor_rollout_ref.rollout"
_STORAGE = "transfer_queue.backend.SimpleStorage"
# A rollout apart shares its GPUs with nothing but the sender of weights.
_CPUS_OF_A_ROLLOUT_GPU = 2
_UNITS = 8


def needed(chosen: Mapping[str, Any], placement: Placement | None = None) -> Need:
    """What verl's actors hold while they train.

    Args:
        chosen: verl's settings, dotted key -> value; what is not among them has verl's default.
    """
    placement = placement or Placement()
    groups = _pool(TRAINER, "the trainer", chosen, "trainer", _where(placement, None))
    if chosen.get("reward.reward_model.enable_resource_pool"):
        groups += _pool(REWARD, "the reward model", chosen, "reward.reward_model", _where(placement, placement.reward))
    if chosen.get("distillation.enabled"):
        groups += _pool(TEACHER, "the teachers", chosen, "distillation", _where(placement, None))
    if chosen.get("trainer.v1.trainer_mode") == "separate_async":
        groups += _rollouts(chosen, _where(placement, placement.rollout))
    workers = int(chosen.get("reward.num_workers", 8))
    remote = workers**2 if chosen.get("reward.reward_manager.name") == "remote" else 0
    simple = chosen.get("transfer_queue.backend.storage_backend", "SimpleStorage") == "SimpleStorage"
    return Need(
        groups=groups,
        dealt=int(chosen.get(f"{_STORAGE}.num_data_storage_units", _UNITS)) if simple else 0,
        # The transfer queue's controller, and what computes rewards in processes of its own.
        single=1 + remote,
        dealt_over=chosen.get(f"{_STORAGE}.required_node_resource"),
    )


def pool_settings(placement: Placement) -> Mapping[str, Any]:
    """verl's settings for the pools that a stage declares."""
    chosen: dict[str, Any] = {}
    if placement.rollout is not None:
        chosen |= {
            "trainer.v1.trainer_mode": "separate_async",
            # verl takes a batch for as many updates; a stage makes one of each.
            "trainer.v1.separate_async.parameter_sync_step": 1,
            f"{_ROLLOUT}.nnodes": placement.rollout.nodes,
            f"{_ROLLOUT}.n_gpus_per_node": placement.rollout.gpus_per_node,
            f"{_ROLLOUT}.checkpoint_engine.backend": "nccl",
        }
    if placement.reward is not None:
        chosen |= {
            "reward.reward_model.enable_resource_pool": True,
            "reward.reward_model.nnodes": placement.reward.nodes,
            "reward.reward_model.n_gpus_per_node": placement.reward.gpus_per_node,
        }
    return chosen


def _pool(pool: str, part: str, chosen: Mapping[str, Any], section: str, where: Where) -> tuple[Group, ...]:
    nodes = int(chosen.get(f"{section}.nnodes", 0))
    gpus = int(chosen.get(f"{section}.n_gpus_per_node", 8))
    return tuple(Group(pool=pool, part=part, gpus=gpus, where=where) for _ in range(nodes))


def _rollouts(chosen: Mapping[str, Any], where: Where) -> tuple[Group, ...]:
    """For each replica a group on each of its nodes, in the order in which replicas are made."""
    if chosen.get(f"{_ROLLOUT}.disaggregation.enabled"):
        # Such replicas look for their GPUs themselves.
        return ()
    each = int(chosen.get(f"{_ROLLOUT}.n_gpus_per_node", chosen["trainer.n_gpus_per_node"]))
    size = 1
    for kind in ("tensor_model_parallel_size", "data_parallel_size", "pipeline_model_parallel_size"):
        size *= int(chosen.get(f"{_ROLLOUT}.{kind}", 1))
    on_node = min(each, size)
    replicas = int(chosen.get(f"{_ROLLOUT}.nnodes", 0)) * each // size
    group = Group(pool=ROLLOUT, part="the rollout", gpus=on_node, cpus_a_gpu=_CPUS_OF_A_ROLLOUT_GPU, where=where)
    return (group,) * (replicas * (size // on_node))


def _where(placement: Placement, pool: Pool | None) -> Where:
    own = pool or Pool(gpus_per_node=1)
    return Where(
        accelerator=own.accelerator or placement.accelerator,
        labels=placement.labels if own.labels is None else own.labels,
    )
