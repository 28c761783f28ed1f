"""Settings that are made smaller after a failure, where the stage allows it, and never below its bounds."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from verl_workflow.spec._failure_class import FailureClass
from verl_workflow.spec._retry import Change
from verl_workflow.spec._training import VerlStage
from verl_workflow.training._overrides import world_size
from verl_workflow.verl_config._compose import compose_config, select

_ACTOR = "actor_rollout_ref.actor"
_ROLLOUT = "actor_rollout_ref.rollout"
_REFERENCE = "actor_rollout_ref.ref"
_PASSES = (
    f"{_ACTOR}.ppo_micro_batch_size_per_gpu",
    f"{_ROLLOUT}.log_prob_micro_batch_size_per_gpu",
    f"{_REFERENCE}.log_prob_micro_batch_size_per_gpu",
    "critic.ppo_micro_batch_size_per_gpu",
)
_TOKENS = (
    f"{_ACTOR}.ppo_max_token_len_per_gpu",
    f"{_ROLLOUT}.log_prob_max_token_len_per_gpu",
    f"{_REFERENCE}.log_prob_max_token_len_per_gpu",
    "critic.ppo_max_token_len_per_gpu",
)
_DYNAMIC = f"{_ACTOR}.use_dynamic_bsz"
_UTILISATION = f"{_ROLLOUT}.gpu_memory_utilization"
_RATE = f"{_ACTOR}.optim.lr"


def next_changes(
    spec: VerlStage, kind: FailureClass, chosen: Mapping[str, Any], before: Mapping[str, Any]
) -> Mapping[str, Any]:
    """The changes of the next attempt after a failure of this class; `before` itself when nothing can get smaller.

    Args:
        chosen: verl's settings as they are written. before: the changes that were in force.
    """
    wanted = [change for change in spec.retry.changes if change.against is kind]
    if not wanted:
        return before
    # What the stage leaves alone has verl's own value.
    config = compose_config(chosen)
    known = {key: select(config, key) for key in (*_PASSES, *_TOKENS, _UTILISATION, _RATE, _DYNAMIC)}
    written = {**chosen, **known}
    changes = dict(before)
    for change in wanted:
        changes |= _changed(spec, change, written, {**written, **before})
    return changes if changes != before else before


def _changed(
    spec: VerlStage, change: Change, written: Mapping[str, Any], current: Mapping[str, Any]
) -> Mapping[str, Any]:
    if change.setting == "micro_batch":
        return _fewer_tokens(spec, change, current) if current[_DYNAMIC] else _fewer_answers(spec, change, current)
    key = _UTILISATION if change.setting == "gpu_memory_utilization" else _RATE
    now = float(current[key])
    lowest = change.at_least if change.at_least is not None else float(written[key]) * change.times**3
    smaller = max(now * change.times, lowest)
    return {key: smaller} if smaller < now else {}


def _fewer_tokens(spec: VerlStage, change: Change, current: Mapping[str, Any]) -> Mapping[str, Any]:
    # A pass has to hold one whole answer.
    lowest = max(int(change.at_least or 1), spec.max_prompt_length + spec.max_response_length)
    sizes = {key: current[key] for key in _TOKENS if isinstance(current[key], int)}
    wanted = {key: max(int(size * change.times), lowest) for key, size in sizes.items()}
    return {key: wanted[key] for key in wanted if wanted[key] < sizes[key]}


def _fewer_answers(spec: VerlStage, change: Change, current: Mapping[str, Any]) -> Mapping[str, Any]:
    """Divisors of a rank's share, for verl takes no others."""
    ranks, prompts = world_size(current), current.get("data.train_batch_size", spec.batch_size)
    answers = current.get(f"{_ROLLOUT}.n", spec.rollouts)
    smaller: dict[str, int] = {}
    for key in _PASSES:
        updates = key.endswith("ppo_micro_batch_size_per_gpu")
        share = (current.get(f"{_ACTOR}.ppo_mini_batch_size", prompts) if updates else prompts) * answers // ranks
        size = current[key]
        if not isinstance(size, int):
            continue
        lowest = max(int(change.at_least or 1), 1)
        fitting = [each for each in range(lowest, int(size * change.times) + 1) if share % each == 0]
        if fitting:
            smaller[key] = fitting[-1]
    return smaller
