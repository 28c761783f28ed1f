"""What a training is watched for: conditions on its metrics, and how long it may take to move."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, PositiveFloat, PositiveInt, field_validator, model_validator

from verl_workflow.gates import check_gate
from verl_workflow.spec._fields import Strict

# What an expression can name; `metric["actor/kl_loss"]` reaches each of verl's own metrics.
GUARD_NAMES = frozenset(
    {"step", "reward", "kl", "entropy", "length", "grad_norm", "learning_rate", "step_seconds", "metric"}
)
_CHECKS = ("non_finite", "kl_above", "entropy_below", "reward_collapse", "length_above", "when")
# In a row, before a check is taken for true.
_STEPS = {"non_finite": 5, "reward_collapse": 5}


class Guard(Strict):
    """A condition on the metrics of a training, looked at after each step: exactly one of the first six fields.

    Attributes:
        non_finite: the mean reward, losses or gradient norms are no numbers. verl passes over such updates, and would
            go on for ever.
        kl_above: the KL divergence (the largest of ``actor/kl_loss`` and ``actor/ppo_kl``).
        entropy_below: ``actor/entropy``, in nats a token.
        reward_collapse: share (0-1) of what the mean reward had gained since the first step that is lost again,
            compared by means over `steps` steps.
        length_above: mean length of the answers, in tokens.
        when: an expression over ``step``, ``reward``, ``kl``, ``entropy``, ``length``, ``grad_norm``,
            ``learning_rate``, ``step_seconds`` and ``metric["verl/name"]``; where a metric that it names is missing, it
            does not hold, and that is told once.
        steps: how many steps in a row it must hold; by default 5 for `non_finite`, a mean over 5 for `reward_collapse`,
            and 1 for the others.
        policy: ``warn`` tells it and goes on; ``stop`` fails the stage; ``rollback`` sets the checkpoints since the
            condition began aside and trains on from the one before, within the budget of class ``numeric``.
        skip: steps after a start or a resume that are not looked at, since metrics need some to settle; 3 by default.
            `non_finite` is looked at from the first.
    """

    non_finite: Literal[True] | None = None
    kl_above: PositiveFloat | None = None
    entropy_below: PositiveFloat | None = None
    reward_collapse: Annotated[float, Field(gt=0, le=1)] | None = None
    length_above: PositiveFloat | None = None
    when: str | None = None
    steps: PositiveInt | None = None
    policy: Literal["warn", "stop", "rollback"] = "stop"
    skip: Annotated[int, Field(ge=0)] = 3

    @field_validator("when")
    @classmethod
    def _is_an_expression(cls, value: str | None) -> str | None:
        if value is not None:
            check_gate(value, GUARD_NAMES)
        return value

    @model_validator(mode="after")
    def _one_check(self) -> Guard:
        if sum(getattr(self, name) is not None for name in _CHECKS) != 1:
            raise ValueError(f"give exactly one of {', '.join(_CHECKS)}")
        return self

    @property
    def check(self) -> str:
        """The field that is given: ``kl_above``, ``when``, ..."""
        return next(name for name in _CHECKS if getattr(self, name) is not None)

    @property
    def steps_in_a_row(self) -> int:
        """How many steps in a row the condition must hold (the width of the mean, for `reward_collapse`)."""
        return self.steps or _STEPS.get(self.check, 1)


class Deadlines(Strict):
    """How long a training may take to move, in seconds; then it is stopped, with the stacks of its processes kept, and
    resumed.

    Attributes:
        start: from the launch of verl's process until it begins with the first step (models loaded, rollout engines
            up).
        first_step: for the first step after that, which also compiles and captures.
        times_median: a later step may take this many times the median step.
        at_least: but always so long, since saving and validation happen between steps.
    """

    start: PositiveFloat = 3600.0
    first_step: PositiveFloat = 3600.0
    times_median: Annotated[float, Field(ge=2)] = 20.0
    at_least: PositiveFloat = 900.0
