"""Settings that are each right, and wrong together."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from verl_workflow.verl_config._finding import Code
from verl_workflow.verl_config._setting import REWARD_MANAGERS

_ACTOR = "actor_rollout_ref.actor"
_ROLLOUT = "actor_rollout_ref.rollout"
_REFERENCE = "actor_rollout_ref.ref"
_ASYNC = "trainer.v1.separate_async"
_CRITIC_DEFAULT = "~/models/deepseek-llm-7b-chat"


@dataclass(frozen=True, kw_only=True)
class Clash:
    """What is wrong with settings together: the key that is told, and a value of it; warnings are not `fatal`."""

    code: Code
    key: str
    what: str
    remedy: str
    fatal: bool = True


@dataclass(frozen=True, kw_only=True)
class Values:
    """The whole configuration by dotted keys; what cannot be known before verl runs is None."""

    config: Any

    def get(self, key: str) -> Any:
        from omegaconf import OmegaConf
        from omegaconf.errors import OmegaConfBaseException

        try:
            found = OmegaConf.select(self.config, key)
        except OmegaConfBaseException:
            # Interpolations of the environment, or of what only verl resolves.
            return None
        return OmegaConf.to_container(found, resolve=False) if OmegaConf.is_config(found) else found

    def count(self, key: str) -> int | None:
        """A number of things; None when it is unknown or below 1, which is told of the setting by itself."""
        value = self.get(key)
        return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else None


def clashes(values: Values, *, rows: int | None = None) -> Iterator[Clash]:
    """All that is wrong with the settings together.

    Args:
        rows: of the training set, when they are known.
    """
    yield from _size(values)
    yield from _batch(values, rows)
    yield from _micro_batches(values)
    yield from _critic(values)
    yield from _rewards(values)
    yield from _separate(values)


def _world(values: Values) -> int | None:
    nodes, each = values.count("trainer.nnodes"), values.count("trainer.n_gpus_per_node")
    return None if nodes is None or each is None else nodes * each


def _size(values: Values) -> Iterator[Clash]:
    world = _world(values)
    sizes = ("tensor_model_parallel_size", "data_parallel_size", "pipeline_model_parallel_size")
    parallel = 1
    for kind in sizes:
        parallel *= values.count(f"{_ROLLOUT}.{kind}") or 1
    apart = values.get("trainer.v1.trainer_mode") == "separate_async"
    if world is not None and not apart and (world < parallel or world % parallel):
        yield Clash(
            code=Code.WORLD_SIZE,
            key=f"{_ROLLOUT}.{sizes[0]}",
            what=f"the {world} GPUs do not divide into rollouts of {parallel} GPUs",
            remedy="Change rollout parallel sizes.",
        )


def _batch(values: Values, rows: int | None) -> Iterator[Clash]:
    world, batch, answers = _world(values), values.count("data.train_batch_size"), values.count(f"{_ROLLOUT}.n")
    mini, steps = values.count(f"{_ACTOR}.ppo_mini_batch_size"), values.count("trainer.total_training_steps")
    epochs = values.count("trainer.total_epochs")
    if rows is not None and batch is not None and rows < batch:
        yield Clash(
            code=Code.TOO_FEW_ROWS,
            key="data.train_batch_size",
            what=f"the training set has {rows} rows, fewer than one batch of {batch}",
            remedy=f"Set the batch size to {rows} or less, or add rows.",
        )
    elif rows is not None and batch and epochs and steps and (limit := (rows // batch) * epochs) < steps:
        yield Clash(
            code=Code.ENDS_EARLY,
            key="trainer.total_epochs",
            what=f"{steps} steps are planned but trainer.total_epochs ends the training after {limit}",
            remedy="Raise trainer.total_epochs or plan fewer steps.",
        )
    if mini is not None and batch is not None and mini > batch:
        yield Clash(
            code=Code.BATCH_ARITHMETIC,
            key=f"{_ACTOR}.ppo_mini_batch_size",
            what=f"actor.ppo_mini_batch_size ({mini}) is above the batch of {batch}",
            remedy="Lower it.",
        )
    if None not in (world, batch, answers) and batch * answers % world and not values.get(f"{_ACTOR}.use_dynamic_bsz"):  # type: ignore[operator]
        yield Clash(
            code=Code.BATCH_ARITHMETIC,
            key="data.train_batch_size",
            what=f"batch size x rollouts ({batch * answers}) must divide by the {world} GPUs",  # type: ignore[operator]
            remedy="Change one of them.",
        )
    if answers == 1 and str(values.get("algorithm.adv_estimator")).startswith(("grpo", "rloo")):
        yield Clash(
            code=Code.TOO_FEW_ROLLOUTS,
            key=f"{_ROLLOUT}.n",
            what=f"{values.get('algorithm.adv_estimator')} compares answers to one prompt, and one is asked for",
            remedy=f"Set {_ROLLOUT}.n to 2 or more.",
        )


def _micro_batches(values: Values) -> Iterator[Clash]:
    """verl asserts minutes after the start that each micro batch divides the rank's share."""
    world, batch, answers = _world(values), values.count("data.train_batch_size"), values.count(f"{_ROLLOUT}.n")
    if values.get(f"{_ACTOR}.use_dynamic_bsz"):
        return
    for section, name in _passes(values):
        key = f"{section}.{name}_per_gpu"
        if values.get(f"{section}.{name}") is not None and values.get(key) is not None:
            yield Clash(
                code=Code.MICRO_BATCH_TWICE,
                key=key,
                what=f"{key} and the deprecated {section}.{name} are both set",
                remedy=f"Remove {section}.{name}.",
            )
        elif values.get(f"{section}.{name}") is None and values.get(key) is None:
            yield Clash(
                code=Code.MICRO_BATCH_MISSING,
                key=key,
                what=f"{key} is not set, and the batch size is not dynamic",
                remedy=f"Set it, or {_ACTOR}.use_dynamic_bsz=True.",
            )
        elif world is not None and batch is not None and answers is not None and not batch * answers % world:
            yield from _divisor(values, key, batch, answers, world)


def _divisor(values: Values, key: str, batch: int, answers: int, world: int) -> Iterator[Clash]:
    size, mini = values.count(key), values.count(f"{_ACTOR}.ppo_mini_batch_size")
    if mini is not None and mini > batch:
        # Told already.
        return
    share = (mini if key.endswith("ppo_micro_batch_size_per_gpu") else batch) or 0
    share = share * answers // world
    if size is not None and share % size:
        yield Clash(
            code=Code.BATCH_ARITHMETIC,
            key=key,
            what=f"{key} ({size}) must divide a rank's share of {share} answers",
            remedy="Choose a divisor.",
        )


def _passes(values: Values) -> Iterator[tuple[str, str]]:
    yield _ACTOR, "ppo_micro_batch_size"
    yield _ROLLOUT, "log_prob_micro_batch_size"
    if values.get(f"{_ACTOR}.use_kl_loss") or values.get("algorithm.use_kl_in_reward"):
        yield _REFERENCE, "log_prob_micro_batch_size"
    if _needs_critic(values):
        yield "critic", "ppo_micro_batch_size"


def _needs_critic(values: Values) -> bool:
    enabled = values.get("critic.enable")
    return bool(enabled) if enabled is not None else values.get("algorithm.adv_estimator") == "gae"


def _critic(values: Values) -> Iterator[Clash]:
    if _needs_critic(values) and values.get("critic.model.path") == _CRITIC_DEFAULT:
        yield Clash(
            code=Code.CRITIC_MODEL_MISSING,
            key="critic.model.path",
            what=f"the critic's model is verl's default, {_CRITIC_DEFAULT}; it does not follow the actor's",
            remedy="Set critic.model.path, or an algorithm.adv_estimator without a critic, such as grpo.",
        )


def _rewards(values: Values) -> Iterator[Clash]:
    manager = values.get("reward.reward_manager.name")
    known = manager is None or manager in REWARD_MANAGERS
    if not known and values.get("reward.reward_manager.source") == "register":
        yield Clash(
            code=Code.NOT_ONE_OF,
            key="reward.reward_manager.name",
            what=f"reward.reward_manager.name cannot be {manager!r}",
            remedy=f"Choose from: {', '.join(REWARD_MANAGERS)}; or load your own with source: importlib.",
        )


def _separate(values: Values) -> Iterator[Clash]:
    """What trainer_separate_async.py asserts."""
    if values.get("trainer.v1.trainer_mode") != "separate_async":
        return
    batch, mini = values.count("data.train_batch_size"), values.count(f"{_ACTOR}.ppo_mini_batch_size")
    every = values.count(f"{_ASYNC}.parameter_sync_step")
    if None not in (batch, mini, every) and batch != every * mini:  # type: ignore[operator]
        yield _apart(
            "data.train_batch_size",
            f"data.train_batch_size ({batch}) must be parameter_sync_step x ppo_mini_batch_size ({every} x {mini})",
            "Change one of them.",
        )
    for name in ("nnodes", "n_gpus_per_node"):
        if (values.count(f"{_ROLLOUT}.{name}") or 0) < 1:
            yield _apart(
                f"{_ROLLOUT}.{name}",
                f"{_ROLLOUT}.{name} must say how many the rollout has for itself",
                "Set it to 1 or more.",
            )
    if values.get(f"{_ROLLOUT}.checkpoint_engine.backend") == "naive":
        yield _apart(
            f"{_ROLLOUT}.checkpoint_engine.backend",
            "a rollout apart cannot take weights by `naive`",
            "Use nccl, for example.",
        )


def _apart(key: str, what: str, remedy: str) -> Clash:
    return Clash(code=Code.SEPARATE_ASYNC, key=key, what=f"separate_async: {what}", remedy=remedy)


def habits(values: Values) -> Iterator[Clash]:
    """What works and loses a night all the same; of a configuration that verl is started with by hand."""
    if not (values.count("trainer.save_freq") or 0) > 0:
        yield Clash(
            code=Code.NO_CHECKPOINTS,
            key="trainer.save_freq",
            what=f"trainer.save_freq={values.get('trainer.save_freq')} saves no checkpoint, not even a last one",
            remedy="Set it to 1 or more.",
            fatal=False,
        )
    if values.get("trainer.val_only") and not values.get("trainer.val_before_train"):
        yield Clash(
            code=Code.VAL_ONLY_TRAINS,
            key="trainer.val_only",
            what="trainer.val_only without trainer.val_before_train trains",
            remedy="Set trainer.val_before_train=True.",
        )
    if values.get(f"{_ROLLOUT}.name") in (None, "???"):
        yield Clash(
            code=Code.ROLLOUT_MISSING,
            key=f"{_ROLLOUT}.name",
            what=f"{_ROLLOUT}.name has no value of its own",
            remedy="Set it to vllm, sglang or trtllm (or hf, of the plugin that ships here).",
        )
    if values.get("trainer.resume_mode") == "resume_path" and not values.get("trainer.resume_from_path"):
        yield Clash(
            code=Code.RESUME_PATH_MISSING,
            key="trainer.resume_from_path",
            what="trainer.resume_mode is resume_path, and there is no path",
            remedy="Set trainer.resume_from_path to a folder global_step_N.",
        )


def paths(values: Values) -> Mapping[str, Any]:
    """Settings that name files or folders, by key."""
    keys = (
        "trainer.default_local_dir",
        "trainer.resume_from_path",
        "trainer.rollout_data_dir",
        "trainer.validation_data_dir",
        "data.train_files",
        "data.val_files",
        "reward.custom_reward_function.path",
        "actor_rollout_ref.model.path",
        "critic.model.path",
    )
    return {key: value for key in keys if (value := values.get(key)) is not None}
