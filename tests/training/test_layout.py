from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from _training_pieces import stage

from verl_workflow.errors import ErrorCode
from verl_workflow.spec import Placement
from verl_workflow.training import check_verl_stage, lacking_resources, required_resources
from verl_workflow.training._layout import needed
from verl_workflow.training._nodes import Node, Where
from verl_workflow.training._overrides import Inputs, settings
from verl_workflow.verl_config._compose import compose_config

GPUS = {"device": "cuda", "rollout": "vllm"}


def chosen(device: str = "cuda", **changes: Any) -> dict[str, Any]:
    nowhere = Path("/")
    inputs = Inputs(
        device=device, model=nowhere, train=nowhere, validation=nowhere, code_dir=nowhere, checkpoints=nowhere
    )
    return settings(stage(**changes), inputs)


def refused(**changes: Any) -> list[str]:
    errors = check_verl_stage(stage(**changes))
    assert all(error.code is ErrorCode.OVERRIDE_INVALID for error in errors)
    return [f"{error.where}: {error.what}" for error in errors]


def test_cpus_counted_are_those_verl_holds() -> None:
    assert needed(chosen("cpu")).cpus == 3 + 1 + 1
    need = needed(chosen(gpus_per_node=8, nodes=2))
    assert (need.gpus, need.cpus, len(need.groups)) == (16, 48 + 8 + 1, 2)
    assert (need.dealt, need.dealt_over, need.single) == (8, "CPU", 1)


def test_rewards_in_processes_of_their_own_take_cpus() -> None:
    overrides = {"reward.reward_manager.name": "remote", "reward.num_workers": 4}
    assert needed(chosen(overrides=overrides)).single == 1 + 16


def test_another_store_of_the_transfer_queue_takes_none_of_its_cpus() -> None:
    overrides = {"transfer_queue.backend.storage_backend": "MooncakeStore"}
    assert needed(chosen(overrides=overrides)).dealt == 0


def test_storage_units_go_where_the_user_says() -> None:
    key = "transfer_queue.backend.SimpleStorage.required_node_resource"
    assert needed(chosen(overrides={f"+{key}": "storage"})).dealt_over == "storage"


def test_a_rollout_apart_has_a_group_for_each_replica_on_each_of_its_nodes() -> None:
    placement = {"accelerator": "H200", "rollout": {"nodes": 2, "gpus_per_node": 8, "accelerator": "L40S"}}
    overrides = {"actor_rollout_ref.rollout.tensor_model_parallel_size": 4}
    found = chosen(gpus_per_node=8, rollout="vllm", placement=placement, overrides=overrides)
    need = needed(found, Placement(**placement))
    trainer, *rollouts = need.groups
    assert (trainer.pool, trainer.gpus, trainer.cpus_a_gpu, trainer.where.accelerator) == ("global_pool", 8, 3, "H200")
    assert [(one.pool, one.gpus, one.cpus_a_gpu, one.where.accelerator) for one in rollouts] == [
        ("rollout", 4, 2, "L40S")
    ] * 4
    config = compose_config(found)
    assert config.trainer.v1.trainer_mode == "separate_async"
    assert config.actor_rollout_ref.rollout.nnodes == 2
    assert config.actor_rollout_ref.rollout.checkpoint_engine.backend == "nccl"


def test_a_replica_that_is_larger_than_a_node_has_a_group_on_each() -> None:
    placement = {"rollout": {"nodes": 2, "gpus_per_node": 8}}
    overrides = {"actor_rollout_ref.rollout.tensor_model_parallel_size": 16}
    need = needed(chosen(placement=placement, overrides=overrides, **{"rollout": "vllm"}), Placement(**placement))
    assert [one.gpus for one in need.groups[1:]] == [8, 8]


def test_a_reward_model_apart_has_a_group_on_each_of_its_nodes() -> None:
    placement = {"labels": {"zone": "a"}, "reward": {"nodes": 2, "gpus_per_node": 2, "labels": {}}}
    overrides = {"reward.reward_model.enable": True, "reward.reward_model.model_path": "/models/judge"}
    found = chosen(placement=placement, overrides=overrides)
    trainer, *rewards = needed(found, Placement(**placement)).groups
    assert trainer.where == Where(labels={"zone": "a"})
    assert [(one.pool, one.part, one.gpus, one.where) for one in rewards] == [
        ("reward_pool", "the reward model", 2, Where())
    ] * 2
    assert compose_config(found).reward.reward_model.nnodes == 2


def test_pools_that_overrides_ask_for_are_counted_too() -> None:
    overrides = {
        "reward.reward_model.enable": True,
        "reward.reward_model.enable_resource_pool": True,
        "reward.reward_model.nnodes": 1,
        "reward.reward_model.n_gpus_per_node": 4,
        "distillation.enabled": True,
        "distillation.nnodes": 1,
        "distillation.n_gpus_per_node": 2,
    }
    assert needed(chosen(overrides=overrides)).gpus == 1 + 4 + 2


def test_replicas_that_look_for_their_gpus_themselves_are_not_held() -> None:
    overrides = {
        "trainer.v1.trainer_mode": "separate_async",
        "actor_rollout_ref.rollout.nnodes": 1,
        "actor_rollout_ref.rollout.disaggregation.enabled": True,
    }
    assert needed(chosen(overrides=overrides)).gpus == 1


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (GPUS | {"placement": {"rollout": {"gpus_per_node": 2}}}, []),
        (
            {"device": "cuda", "rollout": "hf", "placement": {"rollout": {"gpus_per_node": 2}}},
            ["placement: the rollout hf takes its weights on the trainer's own GPUs, and cannot have others"],
        ),
        (
            {"device": "cpu", "placement": {"rollout": {"gpus_per_node": 1}}},
            ["placement: on the CPU all of a training is in one place"],
        ),
        (
            GPUS | {"placement": {"reward": {"gpus_per_node": 1}}},
            ["placement: placement.reward is for a reward model, and there is none"],
        ),
        (
            GPUS
            | {
                "placement": {"rollout": {"gpus_per_node": 1}},
                "overrides": {"trainer.v1.trainer_mode": "colocate_async"},
            },
            ["placement: a rollout apart is verl's separate_async"],
        ),
        (
            {"device": "cuda", "rollout": "sglang"}
            | {
                "placement": {"rollout": {"gpus_per_node": 2}},
                "overrides": {"actor_rollout_ref.rollout.disaggregation.enabled": True},
            },
            [
                "placement: a rollout whose prefill and decoding are apart looks for its GPUs itself; they cannot be "
                "held for it"
            ],
        ),
    ],
)
def test_a_pool_that_cannot_work_is_refused_with_the_reason(changes: dict[str, Any], said: list[str]) -> None:
    assert refused(**changes) == said


def test_a_plan_is_told_what_the_nodes_lack() -> None:
    spec = stage(gpus_per_node=8, rollout="vllm", placement={"accelerator": "H200"})
    assert required_resources(spec) == {"CPU": 33.0, "GPU": 8.0}
    resources = frozenset({"CPU", "GPU", "accelerator_type:A100"})
    nodes = [Node(name="a", cpus=96, gpus=8, free_cpus=0, free_gpus=0, resources=resources)]
    assert "node a has A100 GPUs, not H200" in str(lacking_resources(spec, nodes))
    assert lacking_resources(stage(gpus_per_node=8, rollout="vllm"), nodes) is None
    grows = {"accelerator": "H200", "autoscaled": True}
    assert lacking_resources(stage(gpus_per_node=8, rollout="vllm", placement=grows), nodes) is None
