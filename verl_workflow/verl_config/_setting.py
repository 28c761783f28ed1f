"""Whether one setting is right by itself, by what the installed verl knows."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from verl_workflow.verl_config._compose import ENGINE
from verl_workflow.verl_config._finding import Code
from verl_workflow.verl_config._schema import Schema, fits

ENGINES = ("dp", "megatron", "torchtitan", "veomni")
REWARD_MANAGERS = ("naive", "dapo", "gdpo", "rate_limited", "remote")
# The last is of the plugin that ships here.
ROLLOUTS = ("vllm", "sglang", "trtllm", "hf")
_ENUMS: Mapping[str, tuple[str, ...]] = {
    ENGINE: ENGINES,
    "algorithm.adv_estimator": (
        *("gae", "gdpo", "gpg", "grpo", "grpo_passk", "grpo_vectorized", "opo", "optimal_token_baseline"),
        *("reinforce_plus_plus", "reinforce_plus_plus_baseline", "remax", "rloo", "rloo_vectorized"),
        "tir_optimal_token_baseline",
    ),
    "algorithm.kl_ctrl.type": ("fixed", "adaptive"),
    "actor_rollout_ref.actor.loss_agg_mode": (
        *("token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-sum-norm", "seq-mean-token-mean"),
    ),
    "actor_rollout_ref.actor.policy_loss.loss_mode": (
        *("bypass_mode", "cispo", "clip_cov", "dppo_kl", "dppo_tv", "dro", "geo_mean", "gpg", "gspo"),
        *("kl_cov", "sapo", "vanilla"),
    ),
    "actor_rollout_ref.rollout.name": ROLLOUTS,
    "reward.reward_manager.source": ("register", "importlib"),
    "trainer.resume_mode": ("auto", "disable", "resume_path"),
    "trainer.v1.trainer_mode": ("sync", "colocate_async", "separate_async"),
    "trainer.logger": (
        *("wandb", "mlflow", "swanlab", "vemlp_wandb", "tensorboard", "console", "clearml", "trackio", "file"),
        "rl_insight",
    ),
}
_STRATEGIES = ("fsdp", "fsdp2", "fsdp_turbo", "megatron", "torchtitan", "veomni", "automodel")
_CONTENTS = ("model", "optimizer", "extra", "hf_model")
# Composed for old configurations, and read by nobody.
_LEGACY: Mapping[str, str] = {
    "custom_reward_function": "reward.custom_reward_function",
    "reward_model": "reward.reward_model",
    "sandbox_fusion": "reward.sandbox_fusion",
}
_WITHOUT_EFFECT = frozenset(
    {
        "algorithm.filter_groups.max_num_gen_batches",
        "data.truncation",
        "trainer.balance_batch",
        "trainer.default_hdfs_dir",
        "trainer.esi_redundant_time",
        "trainer.ray_wait_register_center_timeout",
    }
)
# Of what there has to be one at least, by how the key ends.
_COUNTED = (
    *("batch_size", "batch_size_per_gpu", "max_prompt_length", "max_response_length", "rollout.n", "parallel_size"),
    *(
        "trainer.nnodes",
        "trainer.n_gpus_per_node",
        "trainer.total_epochs",
        "trainer.total_training_steps",
        "num_data_storage_units",
    ),
    *("agent.num_workers", "reward.num_workers", "ppo_epochs", "parameter_sync_step"),
)
_PREVIOUS = "trainer.remove_previous_ckpt_in_save"
_KEPT = frozenset({"trainer.max_actor_ckpt_to_keep", "trainer.max_critic_ckpt_to_keep"})


@dataclass(frozen=True, kw_only=True)
class Problem:
    """What is wrong with a setting, and the remedy; not `fatal`: verl takes it, and nothing comes of it."""

    code: Code
    what: str
    remedy: str
    fatal: bool = True


def problem(known: Schema, written: str, value: Any) -> Problem | None:
    """What is wrong with a setting, or None.

    Args:
        written: the dotted key, with the ``+``, ``++`` or ``~`` that hydra gives a meaning.
    """
    key = written.lstrip("+~")
    if key == ENGINE:
        return _enum(key, value)
    top = key.split(".")[0]
    if top in _LEGACY:
        remedy = f"Write `{_LEGACY[top]}{key[len(top) :]}`."
        return Problem(code=Code.LEGACY_KEY, what=f"verl ignores `{key}`", remedy=remedy)
    if key in _WITHOUT_EFFECT:
        what = f"`{key}` has no effect in verl's V1 trainer"
        return Problem(code=Code.WITHOUT_EFFECT, what=what, remedy="Remove it.", fatal=False)
    if key == _PREVIOUS:
        # Not in the YAML, and read all the same.
        return _limit(key, value)
    if not known.known(key):
        return _unknown(known, written, key)
    if written.startswith("~"):
        return None
    kinds = known.kinds(key)
    if kinds is not None and not fits(value, kinds):
        wanted = " or ".join(sorted("null" if kind == "None" else kind for kind in kinds))
        return Problem(code=Code.WRONG_TYPE, what=f"`{key}` must be {wanted}", remedy="Correct the value.")
    return _enum(key, value) or _limit(key, value)


def _unknown(known: Schema, written: str, key: str) -> Problem | None:
    near = known.suggestions(key)
    hint = f"Did you mean {' or '.join(f'`{name}`' for name in near)}?" if near else ""
    if not written.startswith("+"):
        look = "Look it up in verl's trainer/config/ppo_trainer.yaml; a leading + adds a key of your own."
        return Problem(code=Code.UNKNOWN_KEY, what=f"verl has no setting `{key}`", remedy=hint or look)
    if near or known.closed(key):
        what = f"verl has no setting `{key}` and would ignore or refuse it"
        return Problem(code=Code.UNKNOWN_KEY, what=what, remedy=hint or "Remove it.")
    if "." in key and known.known(key.split(".")[0]):
        what = f"verl has no setting `{key}`: it is taken, and read by nothing of verl's"
        return Problem(
            code=Code.UNKNOWN_KEY, what=what, remedy="Remove it, unless your own code reads it.", fatal=False
        )
    return None


def _enum(key: str, value: Any) -> Problem | None:
    allowed: tuple[str, ...] | None = _ENUMS.get(key)
    if key.endswith(".strategy") or key == "strategy":
        allowed = _STRATEGIES
    elif key.endswith((".save_contents", ".load_contents")):
        allowed = _CONTENTS
    if allowed is None:
        return None
    wrong = [item for item in (value if isinstance(value, (list, tuple)) else [value]) if not _allowed(item, allowed)]
    if not wrong:
        return None
    what = f"`{key}` cannot be {wrong[0]!r}"
    return Problem(code=Code.NOT_ONE_OF, what=what, remedy=f"Choose from: {', '.join(allowed)}.")


def _allowed(item: Any, allowed: tuple[str, ...]) -> bool:
    return item in allowed or (isinstance(item, str) and "${" in item)


def _limit(key: str, value: Any) -> Problem | None:
    if isinstance(value, str):
        # An interpolation, which only verl resolves.
        return None
    if key.endswith("gpu_memory_utilization") and value is not None and not 0 < float(value) <= 1:
        what = f"`{key}` is a share of the GPU's memory"
        return Problem(code=Code.OUT_OF_RANGE, what=what, remedy="Give a number above 0 and at most 1.")
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if number and value < 1 and key.endswith(_COUNTED):
        return Problem(code=Code.OUT_OF_RANGE, what=f"`{key}` must be 1 or more", remedy="Correct the value.")
    if number and value < 0 and key.endswith(".optim.lr"):
        return Problem(code=Code.OUT_OF_RANGE, what=f"`{key}` is below 0", remedy="Correct the value.")
    if key.endswith(".checkpoint.async_save") and value:
        what = f"`{key}` leaves checkpoints that cannot be resumed from"
        return Problem(code=Code.ASYNC_SAVE, what=what, remedy="Remove it.")
    if key == "trainer.use_v1" and not value:
        what = "only verl's V1 trainer is supported"
        return Problem(code=Code.OLD_TRAINER, what=what, remedy="Remove `trainer.use_v1`.")
    if (key in _KEPT and value is not None and value < 2) or (key == _PREVIOUS and value):
        what = f"`{key}` deletes the only checkpoint before the next is whole"
        remedy = "Keep 2 or more." if key in _KEPT else "Remove it."
        return Problem(code=Code.ONLY_ONE_CHECKPOINT, what=what, remedy=remedy)
    return None
