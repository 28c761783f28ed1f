"""From a verl stage to verl's own settings: dotted key -> value."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from verl_workflow.spec._inputs import Reward
from verl_workflow.spec._training import VerlStage
from verl_workflow.training._layout import pool_settings

# Tokens that one forward and backward pass may hold on a rank, unless the user sets a micro batch size.
_TOKENS_PER_PASS = {"cpu": 4096, "cuda": 16384}
# On the CPU a pass holds half a dozen copies of its logits, of four bytes each: half a GiB for one of them.
_LOGITS_PER_PASS = 1 << 27
_FP32 = {"param_dtype": "fp32", "reduce_dtype": "fp32", "buffer_dtype": "fp32"}
_FILE_LOGGER = "file"
_EXPONENT = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)[eE][+-]?\d+")


@dataclass(frozen=True, kw_only=True)
class Inputs:
    """What a stage's references stand for.

    Attributes:
        device: ``cpu`` or ``cuda``, never ``auto``.
        model, train, validation: absolute paths.
        code_dir: where reward files lie.
        checkpoints: absolute folder of this stage's checkpoints.
    """

    device: str
    model: Path
    train: Path
    validation: Path
    code_dir: Path
    checkpoints: Path


def settings(spec: VerlStage, inputs: Inputs) -> dict[str, Any]:
    """verl's settings for the stage, the user's overrides included (they win)."""
    cpu = inputs.device == "cpu"
    chosen: dict[str, Any] = {
        **_data(spec, inputs),
        **_model(inputs),
        **_actor(spec, inputs),
        **_rollout(spec, inputs),
        **_reference(spec, inputs),
        **_reward(spec.reward, inputs.code_dir),
        **_trainer(spec, inputs),
        # Left to itself the transfer queue waits for ever on a node without CPUs, such as a head of KubeRay.
        "transfer_queue.backend.SimpleStorage.required_node_resource": "CPU",
        **pool_settings(spec.placement),
    }
    if spec.algorithm == "ppo":
        chosen |= _critic(spec, inputs)
    if cpu:
        chosen |= _cpu_queue(spec)
    chosen |= {key.lstrip("+"): value for _, key, value in user_overrides(spec)}
    chosen["trainer.logger"] = _with_file_logger(chosen["trainer.logger"])
    return chosen


def user_overrides(spec: VerlStage) -> list[tuple[tuple[str, ...], str, Any]]:
    """The user's overrides, flat: (path as it was written, dotted key with its ``+`` if any, value)."""
    return list(_flat(spec.overrides, ()))


def micro_batch(spec: VerlStage, inputs: Inputs) -> int:
    """Answers a rank takes at once: the largest divisor of its share of a step that stays within the token budget."""
    share = max(1, spec.batch_size * spec.rollouts // (spec.nodes * spec.gpus_per_node))
    tokens = spec.max_prompt_length + spec.max_response_length
    budget = _TOKENS_PER_PASS[inputs.device]
    vocabulary = _config(inputs.model).get("vocab_size")
    if inputs.device == "cpu" and isinstance(vocabulary, int) and vocabulary > 0:
        budget = min(budget, _LOGITS_PER_PASS // vocabulary)
    limit = max(1, budget // tokens)
    return max(size for size in range(1, min(share, limit) + 1) if share % size == 0)


def _flat(value: Mapping[str, Any], path: tuple[str, ...]) -> list[tuple[tuple[str, ...], str, Any]]:
    found: list[tuple[tuple[str, ...], str, Any]] = []
    for name, item in value.items():
        here = (*path, str(name))
        if isinstance(item, Mapping) and item:
            found += _flat(item, here)
        else:
            dotted = ".".join(part.lstrip("+") for part in here)
            added = any(part.startswith("+") for part in here)
            found.append((here, f"+{dotted}" if added else dotted, _number(item)))
    return found


def _number(value: Any) -> Any:
    """YAML reads ``1e-5`` as a string; hydra, and whoever wrote it, mean the number."""
    return float(value) if isinstance(value, str) and _EXPONENT.fullmatch(value) else value


def _data(spec: VerlStage, inputs: Inputs) -> dict[str, Any]:
    return {
        "data.train_files": [str(inputs.train)],
        "data.val_files": [str(inputs.validation)],
        "data.train_batch_size": spec.batch_size,
        "data.max_prompt_length": spec.max_prompt_length,
        "data.max_response_length": spec.max_response_length,
        # The rows were checked by the data stage; worker processes only cost start-up time on small machines.
        "data.dataloader_num_workers": 0,
        "data.seed": spec.seed,
    }


def _model(inputs: Inputs) -> dict[str, Any]:
    return {
        "actor_rollout_ref.model.path": str(inputs.model),
        "actor_rollout_ref.model.use_remove_padding": False,
        "actor_rollout_ref.model.enable_gradient_checkpointing": inputs.device == "cuda",
        "actor_rollout_ref.model.override_config.attn_implementation": _attention(inputs.model),
    }


def _attention(model: Path) -> str:
    """SDPA, but for models so small that its dispatch costs more than the arithmetic."""
    return "eager" if 0 < _config(model).get("hidden_size", 0) <= 128 else "sdpa"


def _config(model: Path) -> Mapping[str, Any]:
    """The model's ``config.json``; empty when it has none that can be read, which verl tells better."""
    try:
        found = json.loads((model / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _engine(prefix: str, device: str) -> dict[str, Any]:
    chosen: dict[str, Any] = {f"{prefix}.strategy": "fsdp2", f"{prefix}.use_torch_compile": False}
    if device == "cpu":
        chosen[f"{prefix}.dtype"] = "float32"
        chosen[f"{prefix}.model_dtype"] = "fp32"
        chosen[f"{prefix}.mixed_precision"] = _FP32
    return chosen


def _actor(spec: VerlStage, inputs: Inputs) -> dict[str, Any]:
    contents = ["model", "optimizer", "extra"]
    # On the CPU models are small: weights in Hugging Face format in each checkpoint make the export a copy.
    saved = [*contents, "hf_model"] if inputs.device == "cpu" else contents
    return {
        "algorithm.adv_estimator": "gae" if spec.algorithm == "ppo" else "grpo",
        "algorithm.use_kl_in_reward": False,
        "actor_rollout_ref.actor.strategy": "fsdp2",
        **_engine("actor_rollout_ref.actor.fsdp_config", inputs.device),
        "actor_rollout_ref.actor.use_torch_compile": False,
        "actor_rollout_ref.actor.ppo_mini_batch_size": spec.batch_size,
        "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu": micro_batch(spec, inputs),
        "actor_rollout_ref.actor.optim.lr": spec.learning_rate,
        "actor_rollout_ref.actor.use_kl_loss": spec.kl_coef > 0,
        "actor_rollout_ref.actor.kl_loss_coef": spec.kl_coef,
        "actor_rollout_ref.actor.checkpoint.save_contents": saved,
        "actor_rollout_ref.actor.checkpoint.load_contents": contents,
    }


def _rollout(spec: VerlStage, inputs: Inputs) -> dict[str, Any]:
    chosen: dict[str, Any] = {
        "actor_rollout_ref.rollout.name": spec.rollout,
        "actor_rollout_ref.rollout.n": spec.rollouts,
        "actor_rollout_ref.rollout.temperature": spec.temperature,
        "actor_rollout_ref.rollout.seed": spec.seed,
        "actor_rollout_ref.rollout.dtype": "float32" if inputs.device == "cpu" else "bfloat16",
        "actor_rollout_ref.rollout.tensor_model_parallel_size": 1,
        "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu": micro_batch(spec, inputs),
        "actor_rollout_ref.rollout.agent.num_workers": 1 if inputs.device == "cpu" else 4,
        "actor_rollout_ref.rollout.max_num_seqs": max(256, spec.batch_size * spec.rollouts),
    }
    return chosen


def _reference(spec: VerlStage, inputs: Inputs) -> dict[str, Any]:
    return {
        "actor_rollout_ref.ref.strategy": "fsdp2",
        **_engine("actor_rollout_ref.ref.fsdp_config", inputs.device),
        "actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu": micro_batch(spec, inputs),
    }


def _critic(spec: VerlStage, inputs: Inputs) -> dict[str, Any]:
    return {
        "critic.model.path": str(inputs.model),
        "critic.model.use_remove_padding": False,
        "critic.model.enable_gradient_checkpointing": inputs.device == "cuda",
        "critic.model.override_config.attn_implementation": _attention(inputs.model),
        "critic.strategy": "fsdp2",
        **_engine("critic.fsdp", inputs.device),
        "critic.ppo_micro_batch_size_per_gpu": micro_batch(spec, inputs),
        "critic.optim.lr": spec.critic_learning_rate,
    }


def _reward(reward: Reward, code_dir: Path) -> dict[str, Any]:
    place, _, name = reward.function.rpartition(":")
    path = str(code_dir / place) if place.endswith(".py") else f"pkg://{place}"
    return {
        "reward.num_workers": 1,
        "reward.custom_reward_function.path": path,
        "reward.custom_reward_function.name": name,
        "reward.custom_reward_function.reward_kwargs": dict(reward.kwargs),
    }


def _trainer(spec: VerlStage, inputs: Inputs) -> dict[str, Any]:
    return {
        "trainer.device": inputs.device,
        "trainer.nnodes": spec.nodes,
        "trainer.n_gpus_per_node": spec.gpus_per_node,
        "trainer.total_training_steps": spec.steps,
        # An epoch holds at least one step, so this many can never end the training before its last step.
        "trainer.total_epochs": spec.steps + 1,
        "trainer.logger": ["console", _FILE_LOGGER],
        "trainer.project_name": "verl-workflow",
        "trainer.experiment_name": spec.name,
        "trainer.default_local_dir": str(inputs.checkpoints),
        # verl saves the last step whenever saving is on at all.
        "trainer.save_freq": spec.save_every or spec.steps,
        "trainer.test_freq": spec.test_every or -1,
        "trainer.val_before_train": False,
        "trainer.resume_mode": "disable",
    }


def _cpu_queue(spec: VerlStage) -> dict[str, Any]:
    """One storage unit, and a sampler that looks every 50 ms where verl's own sleeps two seconds a step."""
    return {
        "transfer_queue.backend.SimpleStorage.num_data_storage_units": 1,
        "transfer_queue.backend.SimpleStorage.total_storage_size": max(2000, 4 * spec.batch_size * spec.rollouts),
        "trainer.v1.sampler.custom_sampler.path": "pkg://verl_workflow.verl_plugin.sampler",
        "trainer.v1.sampler.custom_sampler.name": "FastReplayBuffer",
        "trainer.v1.sampler.sampler_kwargs.poll_interval": 0.05,
    }


def _with_file_logger(logger: Any) -> list[Any]:
    """The file logger is how progress is read: it is added when an override leaves it out."""
    named = list(logger) if isinstance(logger, (list, tuple)) else [logger]
    return named if _FILE_LOGGER in named else [*named, _FILE_LOGGER]


def world_size(chosen: Mapping[str, Any]) -> int:
    return int(chosen["trainer.nnodes"]) * int(chosen["trainer.n_gpus_per_node"])
