from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping
from typing import Any

import pytest
from _training_pieces import stage

from verl_workflow.errors import ErrorCode
from verl_workflow.training import check_verl_stage
from verl_workflow.verl_config._schema import fits, schema

ROLLOUT = "actor_rollout_ref.rollout"
ACTOR = "actor_rollout_ref.actor"


def messages(overrides: Mapping[str, Any], **changes: Any) -> list[str]:
    errors = check_verl_stage(stage(overrides=dict(overrides), **changes), train_rows=100)
    assert all(error.code is ErrorCode.OVERRIDE_INVALID for error in errors)
    return [str(error) for error in errors]


@pytest.mark.parametrize("changes", [{}, {"algorithm": "ppo"}, {"device": "cuda", "rollout": "vllm"}])
def test_a_sound_stage_has_no_errors(changes: dict[str, Any]) -> None:
    assert messages({}, **changes) == []


def test_every_default_of_verl_passes_its_own_check() -> None:
    known = schema()

    def walk(node: Mapping[str, Any], prefix: str) -> None:
        for name, value in node.items():
            if name == "_target_" or value == "???":
                continue
            assert known.known(f"{prefix}{name}")
            if isinstance(value, Mapping):
                walk(value, f"{prefix}{name}.")
            elif (kinds := known.kinds(f"{prefix}{name}")) is not None:
                assert fits(value, kinds), f"{prefix}{name}"

    walk(known.base, "")


@pytest.mark.parametrize(
    ("key", "meant"),
    [
        ("trainer.max_ckpt_to_keep", "trainer.max_actor_ckpt_to_keep"),
        ("+trainer.max_ckpt_to_keep", "trainer.max_actor_ckpt_to_keep"),
        (f"{ROLLOUT}.temprature", f"{ROLLOUT}.temperature"),
        ("actor_rolout_ref.rollout.n", ROLLOUT),
        ("lr", f"{ACTOR}.optim.lr"),
    ],
)
def test_unknown_key_says_which_one_is_meant(key: str, meant: str) -> None:
    (message,) = messages({key: 3})
    assert f"`{meant}" in message


def test_unknown_key_behind_a_plus_is_refused_where_verl_would_choke_on_it() -> None:
    assert len(messages({f"+{ACTOR}.nonsense": 1})) == 1
    assert messages({"+my_section.value": 1}) == []


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("trainer.total_epochs", "abc"),
        (f"{ROLLOUT}.n", "abc"),
        (f"{ROLLOUT}.n", 2.5),
        (f"{ROLLOUT}.gpu_memory_utilization", 1.5),
        ("algorithm.adv_estimator", "grpoo"),
        (f"{ACTOR}.strategy", "foo"),
        (f"{ACTOR}.optim.lr", "fast"),
        (f"{ACTOR}.use_kl_loss", "yes please"),
        (f"{ROLLOUT}.name", "foo"),
        ("trainer.logger", ["foo"]),
        ("trainer.val_before_train", 1),
        (f"{ACTOR}.checkpoint.save_contents", ["foo"]),
        ("reward.reward_manager.name", "foo"),
        ("trainer.v1.trainer_mode", "foo"),
        ("model_engine", "foo"),
    ],
)
def test_wrong_value_is_found_and_shown(key: str, value: Any) -> None:
    (message,) = messages({key: value})
    assert key in message
    assert repr(value[0] if isinstance(value, list) else value) in message


@pytest.mark.parametrize(
    "overrides",
    [
        {f"{ACTOR}.entropy_coeff": 0.01},
        {f"{ROLLOUT}.top_p": 0.9},
        {f"{ACTOR}.optim.lr": "1e-5"},
        {f"{ACTOR}.fsdp_config.mixed_precision": {"param_dtype": "bf16"}},
        {"actor_rollout_ref.model.override_config.anything": 1},
        {"ray_kwargs.ray_init.log_to_driver": False},
        {f"{ACTOR}.clip_ratio_high": 0.28, "algorithm.filter_groups.enable": True},
        {f"{ACTOR}.ppo_mini_batch_size": "${data.train_batch_size}"},
        {"trainer.v1.colocate_async.num_warmup_batches": 1.5},
        {"transfer_queue.backend.SimpleStorage.required_node_resource": "worker"},
    ],
)
def test_sound_overrides_pass(overrides: dict[str, Any]) -> None:
    assert messages(overrides) == []


@pytest.mark.parametrize(
    ("overrides", "word"),
    [
        ({f"{ACTOR}.checkpoint.async_save": True}, "resumed"),
        ({"trainer.save_freq": -1}, "retry.attempts"),
        ({"trainer.max_actor_ckpt_to_keep": 1}, "`keep`"),
        ({"trainer.del_local_ckpt_after_load": True}, "stays until newer ones"),
        ({"custom_reward_function.path": "x.py"}, "reward.custom_reward_function.path"),
        ({"data.truncation": "left"}, "no effect"),
        ({"trainer.default_local_dir": "checkpoints"}, "storage"),
        ({"trainer.resume_mode": "auto"}, "newest valid"),
        ({"trainer.val_only": True}, "evaluate"),
        ({f"{ROLLOUT}.tensor_model_parallel_size": 2}, "divide"),
        ({f"{ACTOR}.ppo_mini_batch_size": 99}, "batch of 8"),
        ({f"{ACTOR}.ppo_micro_batch_size_per_gpu": 7}, "16 answers"),
    ],
)
def test_dangerous_settings_are_refused(overrides: dict[str, Any], word: str) -> None:
    (message,) = messages(overrides)
    assert word in message


def test_fewer_rows_than_a_batch() -> None:
    (error,) = check_verl_stage(stage(batch_size=16), train_rows=10)
    assert error.code is ErrorCode.DATA_INVALID
    assert "10 rows" in str(error)


def test_a_gpu_rollout_and_several_ranks_are_refused_on_the_cpu() -> None:
    found = check_verl_stage(stage(device="cpu", rollout="vllm", gpus_per_node=2))
    assert {error.where for error in found} == {"gpus_per_node", "rollout"}


def test_all_mistakes_at_once_each_with_its_place_as_written() -> None:
    overrides = {"trainer": {"total_epochs": "abc"}, "trainer.max_ckpt_to_keep": 1}
    places: list[tuple[str, ...]] = []

    def where(path: tuple[str, ...]) -> str:
        places.append(path)
        return "pipeline.yaml:7:3"

    errors = check_verl_stage(stage(overrides=overrides), where=where)
    assert [error.where for error in errors] == ["pipeline.yaml:7:3"] * 2
    assert places == [("overrides", "trainer", "total_epochs"), ("overrides", "trainer.max_ckpt_to_keep")]


def test_checking_imports_neither_verl_nor_torch() -> None:
    code = (
        "import sys\n"
        "from verl_workflow.training import check_verl_stage\n"
        "from verl_workflow.spec._training import VerlStage\n"
        "spec = VerlStage(name='t', train='a', validation='b', reward={'function': 'r.py:f'}, steps=1, batch_size=4,"
        " save_every=1)\n"
        "assert check_verl_stage(spec) == []\n"
        "assert not {'torch', 'verl', 'transformers'} & set(sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
