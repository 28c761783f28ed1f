from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from _training_pieces import stage

from verl_workflow.training._overrides import Inputs, micro_batch, settings
from verl_workflow.verl_config._compose import compose_config


def inputs(tmp_path: Path, device: str = "cpu") -> Inputs:
    return Inputs(
        device=device,
        model=tmp_path / "model",
        train=tmp_path / "train.parquet",
        validation=tmp_path / "validation.parquet",
        code_dir=tmp_path / "code",
        checkpoints=tmp_path / "checkpoints",
    )


def composed(tmp_path: Path, device: str = "cpu", **changes: Any) -> Any:
    return compose_config(settings(stage(**changes), inputs(tmp_path, device)))


def test_grpo_on_the_cpu_uses_the_plugin_and_full_precision(tmp_path: Path) -> None:
    config = composed(tmp_path)
    assert config.algorithm.adv_estimator == "grpo"
    assert config.trainer.device == "cpu"
    assert config.actor_rollout_ref.rollout.name == "hf"
    assert config.actor_rollout_ref.rollout.dtype == "float32"
    assert config.actor_rollout_ref.actor.fsdp_config.mixed_precision.param_dtype == "fp32"
    assert config.actor_rollout_ref.actor.strategy == "fsdp2"
    assert config.trainer.v1.sampler.custom_sampler.name == "FastReplayBuffer"
    assert config.trainer.v1.sampler.sampler_kwargs.poll_interval == 0.05
    assert "hf_model" in config.actor_rollout_ref.actor.checkpoint.save_contents
    assert "hf_model" not in config.actor_rollout_ref.actor.checkpoint.load_contents


def test_ppo_takes_the_critic_from_the_same_model(tmp_path: Path) -> None:
    config = composed(tmp_path, algorithm="ppo", rollouts=1, critic_learning_rate=3e-5)
    assert config.algorithm.adv_estimator == "gae"
    assert config.critic.model.path == str(tmp_path / "model")
    assert config.critic.optim.lr == 3e-5
    assert config.critic.fsdp.strategy == "fsdp2"
    assert config.actor_rollout_ref.actor.use_kl_loss is True
    assert config.trainer.max_critic_ckpt_to_keep is None


def test_cuda_keeps_mixed_precision_and_verls_own_sampler(tmp_path: Path) -> None:
    config = composed(tmp_path, "cuda", gpus_per_node=4, rollout="vllm")
    assert config.trainer.device == "cuda"
    assert config.actor_rollout_ref.rollout.dtype == "bfloat16"
    assert config.trainer.v1.sampler.custom_sampler.path is None
    assert config.trainer.n_gpus_per_node == 4
    assert "hf_model" not in config.actor_rollout_ref.actor.checkpoint.save_contents


def test_training_ends_at_the_planned_step_and_saves_it(tmp_path: Path) -> None:
    config = composed(tmp_path, steps=500, save_every=None, retry={"attempts": 1})
    assert config.trainer.total_training_steps == 500
    assert config.trainer.total_epochs > 500 // 1
    assert config.trainer.save_freq == 500


def test_overrides_win_in_either_form(tmp_path: Path) -> None:
    config = composed(
        tmp_path,
        learning_rate=1e-6,
        overrides={
            "actor_rollout_ref.actor.optim.lr": "2e-5",
            "actor_rollout_ref": {"rollout": {"top_p": 0.9}},
            "+actor_rollout_ref.model.override_config.rope_theta": 7,
        },
    )
    assert config.actor_rollout_ref.actor.optim.lr == 2e-5
    assert config.actor_rollout_ref.rollout.top_p == 0.9
    assert config.actor_rollout_ref.model.override_config.rope_theta == 7


def test_values_with_characters_of_hydras_grammar_arrive_unchanged(tmp_path: Path) -> None:
    odd = "a=b, {c}: 'd' [e]"
    config = composed(tmp_path, overrides={"trainer.project_name": odd})
    assert config.trainer.project_name == odd


def test_file_logger_survives_an_override(tmp_path: Path) -> None:
    config = composed(tmp_path, overrides={"trainer.logger": ["console"]})
    assert list(config.trainer.logger) == ["console", "file"]


@pytest.mark.parametrize(
    ("function", "path", "name"),
    [("reward.py:score", "{code}/reward.py", "score"), ("pkg.mod:fn", "pkg://pkg.mod", "fn")],
)
def test_reward_function_and_its_arguments(tmp_path: Path, function: str, path: str, name: str) -> None:
    config = composed(tmp_path, reward={"function": function, "kwargs": {"weight": 0.5}})
    chosen = config.reward.custom_reward_function
    assert chosen.path == path.format(code=tmp_path / "code")
    assert chosen.name == name
    assert dict(chosen.reward_kwargs) == {"weight": 0.5}


def test_tiny_models_use_eager_attention(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    key = "actor_rollout_ref.model.override_config.attn_implementation"
    for width, attention in ((64, "eager"), (576, "sdpa")):
        (tmp_path / "model" / "config.json").write_text(json.dumps({"hidden_size": width}))
        assert settings(stage(), inputs(tmp_path))[key] == attention


@pytest.mark.parametrize(("batch", "rollouts", "tokens"), [(16, 4, 72), (7, 3, 4096), (8, 4, 128), (1, 2, 99_999)])
def test_micro_batch_divides_the_share_within_the_token_budget(
    tmp_path: Path, batch: int, rollouts: int, tokens: int
) -> None:
    spec = stage(batch_size=batch, rollouts=rollouts, max_prompt_length=tokens - 8, max_response_length=8)
    size = micro_batch(spec, inputs(tmp_path))
    assert batch * rollouts % size == 0
    assert size == 1 or size * tokens <= 8192


def test_a_large_vocabulary_makes_the_passes_on_the_cpu_smaller(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    spec = stage(batch_size=16, rollouts=4, max_prompt_length=96, max_response_length=32)
    for vocabulary, size in ((512, 32), (49_152, 16), (10**9, 1)):
        (tmp_path / "model" / "config.json").write_text(json.dumps({"vocab_size": vocabulary}))
        assert micro_batch(spec, inputs(tmp_path)) == size
    assert micro_batch(spec, inputs(tmp_path, "cuda")) == 64
