"""Mistakes in a verl stage that verl itself would find only minutes later, or never."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from verl_workflow.errors import ErrorCode, UserError
from verl_workflow.spec._fields import REFERENCE
from verl_workflow.spec._model import VerlStage
from verl_workflow.training._config import ENGINE
from verl_workflow.training._overrides import Inputs, cpus_needed, settings, user_overrides, world_size
from verl_workflow.training._schema import Schema, fits, schema

Where = Callable[[tuple[str, ...]], str]

_ENUMS: Mapping[str, tuple[str, ...]] = {
    ENGINE: ("dp", "megatron", "torchtitan", "veomni"),
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
    "actor_rollout_ref.rollout.name": ("hf", "vllm", "sglang", "trtllm"),
    "reward.reward_manager.source": ("register", "importlib"),
    "trainer.v1.trainer_mode": ("sync", "colocate_async", "separate_async"),
    "trainer.logger": (
        *("wandb", "mlflow", "swanlab", "vemlp_wandb", "tensorboard", "console", "clearml", "trackio", "file"),
        "rl_insight",
    ),
}
_REWARD_MANAGERS = ("naive", "dapo", "gdpo", "rate_limited", "remote")
_STRATEGIES = ("fsdp", "fsdp2", "fsdp_turbo", "megatron", "torchtitan", "veomni", "automodel")
_CONTENTS = ("model", "optimizer", "extra", "hf_model")

# Keys whose value the stage itself decides: (what the user should set instead).
_OWNED: Mapping[str, str] = {
    "actor_rollout_ref.model.path": "the stage's `model`",
    "data.train_files": "the stage's `train`",
    "data.val_files": "the stage's `validation`",
    "reward.custom_reward_function.name": "the stage's `reward`",
    "reward.custom_reward_function.path": "the stage's `reward`",
    "trainer.default_local_dir": "nothing: checkpoints belong to the run's storage",
    "trainer.device": "the stage's `device`",
    "trainer.resume_from_path": "nothing: the newest valid checkpoint is taken",
    "trainer.resume_mode": "nothing: the newest valid checkpoint is taken",
    "trainer.total_training_steps": "the stage's `steps`",
    "ray_kwargs.ray_init.address": "nothing: the stage joins the cluster it runs on",
}
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


def check_verl_stage(
    spec: VerlStage,
    *,
    model_path: Path | None = None,
    train_rows: int | None = None,
    where: Where | None = None,
) -> list[UserError]:
    """All mistakes in the stage that can be known before anything runs, checked against the installed verl.

    Takes about a second and imports neither verl nor torch.

    Args:
        model_path: the model, when it exists already.
        train_rows: rows of the training set, when they are known.
        where: place of a field, given its path in the stage, for example ``("overrides", "trainer.save_freq")`` as it
            was written; by default that path, dotted.

    Returns:
        One UserError for each mistake, most of them OVERRIDE_INVALID; empty when there are none.
    """
    return check_settings(spec, _likely(spec, model_path), train_rows=train_rows, where=where)


def required_resources(spec: VerlStage) -> dict[str, float]:
    """What verl's actors hold on the cluster while the stage trains, by Ray's names: ``{"CPU": 6.0, "GPU": 1.0}``."""
    chosen = _likely(spec, None)
    return {"CPU": float(cpus_needed(chosen)), "GPU": float(world_size(chosen))}


def _likely(spec: VerlStage, model_path: Path | None) -> dict[str, Any]:
    """The settings as far as they are known before the cluster and the inputs are."""
    device = spec.device if spec.device != "auto" else "cuda" if spec.rollout != "hf" else "cpu"
    nowhere = Path("/")
    return settings(
        spec,
        Inputs(
            device=device,
            model=model_path or nowhere,
            train=nowhere,
            validation=nowhere,
            code_dir=nowhere,
            checkpoints=nowhere,
        ),
    )


def check_settings(
    spec: VerlStage, chosen: Mapping[str, Any], *, train_rows: int | None = None, where: Where | None = None
) -> list[UserError]:
    """As `check_verl_stage`, for settings that are already computed."""
    place = where or ".".join
    errors: list[UserError] = []
    engine = str(chosen.get(ENGINE, "dp"))
    known = schema(engine if engine in _ENUMS[ENGINE] else "dp")
    for path, key, value in user_overrides(spec):
        if problem := _override(known, key, value):
            what, remedy = problem
            errors.append(
                UserError(
                    ErrorCode.OVERRIDE_INVALID, what, where=place(("overrides", *path)), value=value, remedy=remedy
                )
            )
    if errors:
        # Arithmetic over wrong values only repeats what was said.
        return errors
    return [
        UserError(code, what, where=place(path), remedy=remedy)
        for code, path, what, remedy in _combinations(spec, chosen, train_rows)
    ]


def _override(known: Schema, written: str, value: Any) -> tuple[str, str] | None:
    """What is wrong with one override, and the remedy."""
    key = written.lstrip("+~")
    if key == ENGINE:
        return _enum(key, value)
    top = key.split(".")[0]
    if top in _LEGACY:
        return (f"verl ignores `{key}`", f"Write `{_LEGACY[top]}{key[len(top) :]}`.")
    if key in _OWNED:
        return (f"`{key}` is decided by the stage", f"Set {_OWNED[key]}.")
    if key in _WITHOUT_EFFECT:
        return (f"`{key}` has no effect in verl's V1 trainer", "Remove it.")
    if not known.known(key):
        near = known.suggestions(key)
        hint = f"Did you mean {' or '.join(f'`{name}`' for name in near)}?" if near else ""
        if not written.startswith("+"):
            return (
                f"verl has no setting `{key}`",
                hint or "Look it up in verl's trainer/config/ppo_trainer.yaml; a leading + adds a key of your own.",
            )
        if near or known.closed(key):
            return (f"verl has no setting `{key}` and would ignore or refuse it", hint or "Remove it.")
        return None
    if isinstance(value, str) and REFERENCE.fullmatch(value):
        return None
    kinds = known.kinds(key)
    if kinds is not None and not fits(value, kinds):
        wanted = " or ".join(sorted("null" if kind == "None" else kind for kind in kinds))
        return (f"`{key}` must be {wanted}", "Correct the value.")
    return _enum(key, value) or _limit(key, value)


def _enum(key: str, value: Any) -> tuple[str, str] | None:
    allowed: tuple[str, ...] | None = _ENUMS.get(key)
    if key.endswith(".strategy") or key == "strategy":
        allowed = _STRATEGIES
    elif key.endswith((".save_contents", ".load_contents")):
        allowed = _CONTENTS
    if allowed is None:
        return None
    wrong = [item for item in (value if isinstance(value, (list, tuple)) else [value]) if not _allowed(item, allowed)]
    return (f"`{key}` cannot be {wrong[0]!r}", f"Choose from: {', '.join(allowed)}.") if wrong else None


def _allowed(item: Any, allowed: tuple[str, ...]) -> bool:
    return item in allowed or (isinstance(item, str) and "${" in item)


def _limit(key: str, value: Any) -> tuple[str, str] | None:
    if key.endswith("gpu_memory_utilization") and not 0 < float(value) <= 1:
        return (f"`{key}` is a share of the GPU's memory", "Give a number above 0 and at most 1.")
    if key.endswith(".checkpoint.async_save") and value:
        return (f"`{key}` leaves checkpoints that cannot be resumed from", "Remove it.")
    if key == "trainer.val_only" and value:
        return ("a verl stage trains; `trainer.val_only` would not", "Use an evaluate stage.")
    if key == "trainer.use_v1" and not value:
        return ("only verl's V1 trainer is supported", "Remove `trainer.use_v1`.")
    if key in ("trainer.max_actor_ckpt_to_keep", "trainer.max_critic_ckpt_to_keep") and value is not None and value < 2:
        return (f"`{key}` below 2 deletes the only checkpoint before the next is whole", "Keep 2 or more.")
    if key == "trainer.remove_previous_ckpt_in_save" and value:
        return (f"`{key}` deletes the only checkpoint before the next is whole", "Remove it.")
    return None


_Finding = tuple[ErrorCode, tuple[str, ...], str, str]


def _combinations(spec: VerlStage, chosen: Mapping[str, Any], train_rows: int | None) -> list[_Finding]:
    """Settings that are each right and wrong together."""
    found: list[_Finding] = []

    def wrong(path: tuple[str, ...], what: str, remedy: str, code: ErrorCode = ErrorCode.OVERRIDE_INVALID) -> None:
        found.append((code, path, what, remedy))

    def value(key: str, default: int = 1) -> int:
        number = chosen.get(key)
        return number if isinstance(number, int) else default

    world = world_size(chosen)
    batch = value("data.train_batch_size")
    answers = value("actor_rollout_ref.rollout.n")
    mini = value("actor_rollout_ref.actor.ppo_mini_batch_size", 0)
    manager = chosen.get("reward.reward_manager.name", _REWARD_MANAGERS[0])
    if chosen.get("reward.reward_manager.source", "register") == "register" and manager not in _REWARD_MANAGERS:
        wrong(
            ("overrides",),
            f"reward.reward_manager.name cannot be {manager!r}",
            f"Choose from: {', '.join(_REWARD_MANAGERS)}; or load your own with source: importlib.",
        )
    if chosen["trainer.device"] == "cpu":
        if world > 1:
            wrong(
                ("gpus_per_node",),
                f"on the CPU a training has one rank, not {world}",
                "Set nodes and gpus_per_node to 1.",
            )
        if chosen["actor_rollout_ref.rollout.name"] != "hf":
            wrong(("rollout",), f"{chosen['actor_rollout_ref.rollout.name']} needs a GPU", "Set rollout to hf.")
    if train_rows is not None and train_rows < batch:
        wrong(
            ("batch_size",),
            f"the training set has {train_rows} rows, fewer than one batch of {batch}",
            f"Set batch_size to {train_rows} or less, or add rows.",
            ErrorCode.DATA_INVALID,
        )
    elif train_rows is not None and (limit := (train_rows // batch) * value("trainer.total_epochs")) < spec.steps:
        wrong(
            ("steps",),
            f"{spec.steps} steps are planned but trainer.total_epochs ends the training after {limit}",
            "Remove trainer.total_epochs or plan fewer steps.",
        )
    if batch * answers % world:
        wrong(
            ("batch_size",),
            f"batch_size x rollouts ({batch * answers}) must divide by the {world} GPUs",
            "Change one of them.",
        )
    parallel = 1
    for kind in ("tensor_model_parallel_size", "data_parallel_size", "pipeline_model_parallel_size"):
        parallel *= value(f"actor_rollout_ref.rollout.{kind}")
    if world % parallel:
        wrong(
            ("overrides",),
            f"the {world} GPUs do not divide into rollouts of {parallel} GPUs",
            "Change rollout parallel sizes.",
        )
    if mini > batch:
        wrong(("overrides",), f"actor.ppo_mini_batch_size ({mini}) is above the batch of {batch}", "Lower it.")
    else:
        found += _micro_batches(chosen, world, batch, mini, answers)
    if spec.retry.attempts > 1 and value("trainer.save_freq") < 1:
        wrong(
            ("overrides",),
            f"retry.attempts is {spec.retry.attempts} but trainer.save_freq saves nothing to resume from",
            "Remove trainer.save_freq, or set it to 1 or more.",
        )
    elif value("trainer.save_freq") < 1:
        wrong(
            ("overrides",), "without a checkpoint there is no model to hand on", "Set trainer.save_freq to 1 or more."
        )
    return found


def _micro_batches(chosen: Mapping[str, Any], world: int, batch: int, mini: int, answers: int) -> list[_Finding]:
    """verl asserts minutes after the start that each micro batch divides the rank's share."""
    actor = "actor_rollout_ref.actor"
    if chosen.get(f"{actor}.use_dynamic_bsz") or batch * answers % world:
        return []
    # 0: an interpolation, known to verl alone.
    update = (mini or batch) * answers // world
    shares = {
        f"{actor}.ppo_micro_batch_size_per_gpu": update,
        "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu": batch * answers // world,
        "actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu": batch * answers // world,
        "critic.ppo_micro_batch_size_per_gpu": update,
    }
    return [
        (
            ErrorCode.OVERRIDE_INVALID,
            ("overrides",),
            f"{key} ({size}) must divide a rank's share of {share} answers",
            "Choose a divisor.",
        )
        for key, share in shares.items()
        if isinstance(size := chosen.get(key), int) and (size < 1 or (mini and share % size))
    ]
