"""How the reward of a training went: its metrics over all attempts, and the evaluations of its models."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from verl_workflow.outline import Outline, StageOutline, outline_of
from verl_workflow.stored_json import is_number
from verl_workflow.training import REWARD, Row, attempt_rows

if TYPE_CHECKING:
    from verl_workflow.workflow import RunState

# The name verl gives the first figure of a validation set, by data source: verl/trainer/ppo/metric_utils.py.
_VALIDATION = re.compile(r"val-core/.+/mean@\d+")

Points = tuple[tuple[int, float], ...]


@dataclass(frozen=True, kw_only=True)
class Mark:
    """An evaluation of a model that the training started from or ended with."""

    label: str
    step: int
    score: float


@dataclass(frozen=True, kw_only=True)
class Learning:
    """One training.

    Attributes:
        rewards: (step, mean reward of the sampled answers). validations: (step, mean score of greedy answers to the
            held-out rows), averaged over data sources.
        resumed: steps at which a later attempt took over.
        marks: evaluations by the pipeline's own evaluate stages, before and after.
    """

    stage: str
    rewards: Points
    validations: Points
    resumed: tuple[int, ...]
    marks: tuple[Mark, ...]


def learning_of(state: RunState) -> list[Learning]:
    """The trainings of a run that have made a step, in the pipeline's order; of one that goes on, what there is.

    Raises:
        VerlWorkflowError(JOURNAL_DAMAGED): the run's definition is none of a pipeline, or a value is not what was
            recorded.
    """
    outline = outline_of(state)
    trainings = [stage for stage in outline.stages if stage.kind == "verl" and stage.name in state.steps]
    found = [_learning(state, outline, training) for training in trainings]
    return [learning for learning in found if learning.rewards]


def _learning(state: RunState, outline: Outline, training: StageOutline) -> Learning:
    name = training.name
    attempts = attempt_rows(_folder(state, outline, name))
    # A step that was trained again counts as it was the last time.
    rewards = {row.step: reward for rows in attempts for row in rows if (reward := row.number(REWARD)) is not None}
    validations = {row.step: score for rows in attempts for row in rows if (score := _validation(row)) is not None}
    begun = [next((row.step for row in rows if row.trained), None) for rows in attempts]
    return Learning(
        stage=name,
        rewards=tuple(sorted(rewards.items())),
        validations=tuple(sorted(validations.items())),
        resumed=tuple([step for step in begun if step is not None][1:]),
        marks=tuple(_marks(state, outline, training, max(rewards, default=0))),
    )


def _folder(state: RunState, outline: Outline, stage: str) -> Path:
    """Where the attempts of the stage lie: in the run that trained it, when its result was taken over."""
    run = state.steps[stage].reused_from or state.run_id
    return Path(outline.artifacts) / "runs" / run / "stages" / stage


def _validation(row: Row) -> float | None:
    scores = [score for key in row.data if _VALIDATION.fullmatch(key) and (score := row.number(key)) is not None]
    return sum(scores) / len(scores) if scores else None


def _marks(state: RunState, outline: Outline, training: StageOutline, last: int) -> Iterator[Mark]:
    places = {f"${{{training.name}.model}}": last, str(training.fields.get("model")): 0}
    for stage in outline.stages:
        step = state.steps.get(stage.name)
        place = places.get(str(stage.fields.get("model")))
        if stage.kind != "evaluate" or step is None or place is None:
            continue
        score = _score(step.value)
        if score is not None:
            yield Mark(label=stage.name, step=place, score=score)


def _score(value: Any) -> float | None:
    """What an evaluation came to; None for a value of another shape."""
    candidate = value.get("candidate") if isinstance(value, Mapping) else None
    score = candidate.get("acc", candidate.get("score")) if isinstance(candidate, Mapping) else None
    return float(score) if is_number(score) else None
