"""Mistakes in a verl stage that verl itself would find only minutes later, or never."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from verl_workflow.errors import ErrorCode, UserError
from verl_workflow.spec._fields import REFERENCE
from verl_workflow.spec._training import VerlStage
from verl_workflow.trackers import missing_clients
from verl_workflow.training._layout import needed
from verl_workflow.training._nodes import Node, shortage
from verl_workflow.training._overrides import Inputs, settings, user_overrides, world_size
from verl_workflow.verl_config._compose import ENGINE, compose_config
from verl_workflow.verl_config._finding import Code, Finding, Severity
from verl_workflow.verl_config._lint import surroundings
from verl_workflow.verl_config._schema import Schema, schema
from verl_workflow.verl_config._setting import ENGINES, Problem, problem
from verl_workflow.verl_config._together import Clash, Values, clashes
from verl_workflow.verl_config._written import Setting

Where = Callable[[tuple[str, ...]], str]

# Keys whose value the stage itself decides: (what the user should set instead).
_OWNED: Mapping[str, str] = {
    "actor_rollout_ref.model.path": "the stage's `model`",
    "data.train_files": "the stage's `train`",
    "data.val_files": "the stage's `validation`",
    "reward.custom_reward_function.name": "the stage's `reward`",
    "reward.custom_reward_function.path": "the stage's `reward`",
    "trainer.default_local_dir": "nothing: checkpoints belong to the run's storage",
    "trainer.del_local_ckpt_after_load": "nothing: a checkpoint stays until newer ones are there",
    "trainer.device": "the stage's `device`",
    "trainer.max_actor_ckpt_to_keep": "the stage's `keep`",
    "trainer.max_critic_ckpt_to_keep": "the stage's `keep`",
    "trainer.remove_previous_ckpt_in_save": "the stage's `keep`",
    "trainer.resume_from_path": "nothing: the newest valid checkpoint is taken",
    "trainer.resume_mode": "nothing: the newest valid checkpoint is taken",
    "trainer.total_training_steps": "the stage's `steps`",
    "ray_kwargs.ray_init.address": "nothing: the stage joins the cluster it runs on",
}
_OWN = frozenset({"gpus_per_node", "placement", "rollout"})
# The field of the stage behind a key that its settings have been found wrong in.
_FIELDS: Mapping[str, str] = {
    "data.train_batch_size": "batch_size",
    "trainer.n_gpus_per_node": "gpus_per_node",
    "trainer.total_epochs": "steps",
}


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


def warn_of_verl_stage(spec: VerlStage, *, where: Where | None = None) -> list[Finding]:
    """What verl takes and a night may be lost by, in the stage's overrides; each finding has a place as its error has.

    Takes about a second and imports neither verl nor torch.
    """
    place = where or ".".join
    written = {
        key.lstrip("+~"): Setting(key=key, value=value, where=place(("overrides", *path)))
        for path, key, value in user_overrides(spec)
    }
    values = Values(config=compose_config(_likely(spec, None)))
    found = [finding for finding in surroundings(values, written) if finding.key in written]
    for setting in written.values():
        wrong = problem(schema(), setting.key, setting.value)
        if wrong is not None and not wrong.fatal and wrong.code is not Code.WITHOUT_EFFECT:
            found.append(
                Finding(
                    code=wrong.code,
                    severity=Severity.WARNING,
                    key=setting.key.lstrip("+"),
                    what=wrong.what,
                    remedy=wrong.remedy,
                    where=setting.where,
                    value=setting.value,
                )
            )
    return found


def required_resources(spec: VerlStage) -> dict[str, float]:
    """What verl's actors hold on the cluster while the stage trains, by Ray's names: ``{"CPU": 6.0, "GPU": 1.0}``."""
    need = needed(_likely(spec, None), spec.placement)
    return {"CPU": float(need.cpus), "GPU": float(need.gpus)}


def lacking_resources(spec: VerlStage, nodes: Sequence[Node]) -> str | None:
    """What the nodes lack, were they idle, to hold the stage's training; None when it fits, or when nodes come by
    themselves.
    """
    if spec.placement.autoscaled:
        return None
    return shortage(needed(_likely(spec, None), spec.placement), nodes, idle=True)


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
    known = schema(engine if engine in ENGINES else "dp")
    for path, key, value in user_overrides(spec):
        wrong = _override(known, key, value)
        if wrong is not None and (wrong.fatal or wrong.code is Code.WITHOUT_EFFECT):
            at = place(("overrides", *path))
            errors.append(UserError(ErrorCode.OVERRIDE_INVALID, wrong.what, where=at, value=value, remedy=wrong.remedy))
    if errors:
        # Arithmetic over wrong values only repeats what was said.
        return errors
    for kind, extra in missing_clients([tracker.model_dump() for tracker in spec.trackers]).items():
        errors.append(
            UserError(
                ErrorCode.DEPENDENCY_MISSING,
                f"the tracker's client, {kind}, is not installed",
                where=place(("trackers",)),
                remedy=f'Install it with: uv pip install "verl-workflow[{extra}]".',
            )
        )
    found = [*_of_the_stage(spec, chosen), *clashes(Values(config=compose_config(chosen)), rows=train_rows)]
    return errors + [
        UserError(
            ErrorCode.DATA_INVALID if clash.code is Code.TOO_FEW_ROWS else ErrorCode.OVERRIDE_INVALID,
            clash.what,
            where=place((_FIELDS.get(clash.key, clash.key if clash.key in _OWN else "overrides"),)),
            remedy=clash.remedy,
        )
        for clash in found
    ]


def _override(known: Schema, written: str, value: Any) -> Problem | None:
    """What is wrong with one override."""
    key = written.lstrip("+~")
    if key in _OWNED:
        what, remedy = f"`{key}` is decided by the stage", f"Set {_OWNED[key]}."
        return Problem(code=Code.DECIDED_BY_STAGE, what=what, remedy=remedy)
    if key == "trainer.val_only" and value:
        what = "a verl stage trains; `trainer.val_only` would not"
        return Problem(code=Code.VAL_ONLY_TRAINS, what=what, remedy="Use an evaluate stage.")
    if isinstance(value, str) and REFERENCE.fullmatch(value) and known.known(key):
        return None
    return problem(known, written, value)


def _of_the_stage(spec: VerlStage, chosen: Mapping[str, Any]) -> Iterator[Clash]:
    """What is wrong only because it is a stage."""
    world, rollout = world_size(chosen), chosen["actor_rollout_ref.rollout.name"]
    if chosen["trainer.device"] == "cpu":
        if world > 1:
            yield Clash(
                code=Code.WORLD_SIZE,
                key="gpus_per_node",
                what=f"on the CPU a training has one rank, not {world}",
                remedy="Set nodes and gpus_per_node to 1.",
            )
        if rollout != "hf":
            yield Clash(code=Code.NOT_ONE_OF, key="rollout", what=f"{rollout} needs a GPU", remedy="Set rollout to hf.")
    yield from _pools(spec, chosen)
    saves = chosen.get("trainer.save_freq")
    if isinstance(saves, int) and saves < 1:
        what = (
            f"retry.attempts is {spec.retry.attempts} but trainer.save_freq saves nothing to resume from"
            if spec.retry.attempts > 1
            else "without a checkpoint there is no model to hand on"
        )
        remedy = "Remove trainer.save_freq, or set it to 1 or more."
        yield Clash(code=Code.NO_CHECKPOINTS, key="trainer.save_freq", what=what, remedy=remedy)


def _pools(spec: VerlStage, chosen: Mapping[str, Any]) -> Iterator[Clash]:
    """What a pool of its own needs to be of use, and to work in this verl."""
    apart, reward = spec.placement.rollout is not None, spec.placement.reward is not None
    rollout = chosen["actor_rollout_ref.rollout.name"]

    def wrong(what: str, remedy: str) -> Clash:
        return Clash(code=Code.SEPARATE_ASYNC, key="placement", what=what, remedy=remedy)

    if (apart or reward) and chosen["trainer.device"] == "cpu":
        yield wrong("on the CPU all of a training is in one place", "Remove placement.rollout and placement.reward.")
    elif apart and rollout == "hf":
        yield wrong(
            "the rollout hf takes its weights on the trainer's own GPUs, and cannot have others",
            "Set rollout to vllm or sglang, or remove placement.rollout.",
        )
    elif apart and chosen.get("trainer.v1.trainer_mode") != "separate_async":
        yield wrong("a rollout apart is verl's separate_async", "Remove trainer.v1.trainer_mode from overrides.")
    elif apart and chosen.get("actor_rollout_ref.rollout.disaggregation.enabled"):
        yield wrong(
            "a rollout whose prefill and decoding are apart looks for its GPUs itself; they cannot be held for it",
            "Turn disaggregation off, or remove placement.rollout.",
        )
    if reward and not chosen.get("reward.reward_model.enable"):
        yield wrong(
            "placement.reward is for a reward model, and there is none",
            "Set reward.reward_model.enable and reward.reward_model.model_path in overrides, or remove it.",
        )
