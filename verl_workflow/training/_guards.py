"""Conditions on the metrics of a training: which of them hold after a step, and since when."""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from verl_workflow.errors import UserError
from verl_workflow.gates import evaluate_gate
from verl_workflow.spec._supervision import Guard
from verl_workflow.training._metrics import REWARD, STEP_SECONDS, Row, non_finite

_KL = ("actor/kl_loss", "actor/ppo_kl")
_ENTROPY = "actor/entropy"
_LENGTH = "response_length/mean"
_GRADIENT = "actor/grad_norm"
_RATE = "actor/lr"


@dataclass(frozen=True, kw_only=True)
class Alarm:
    """A guard whose condition holds.

    Attributes:
        what: a sentence fragment with the figures. since: the first step of those for which it has held.
    """

    guard: Guard
    what: str
    since: int


def in_force(guards: Sequence[Guard]) -> tuple[Guard, ...]:
    """The guards of a stage, and the one that is always there."""
    always = () if any(guard.non_finite for guard in guards) else (Guard(non_finite=True),)
    return (*always, *guards)


@dataclass(kw_only=True)
class GuardedRows:
    """Looks at each new row with each guard.

    Attributes:
        guards: as they are in force. start: the step resumed from, 0 for none.
        earlier: rows of earlier attempts up to there, for what a reward had gained.
    """

    guards: Sequence[Guard]
    start: int = 0
    earlier: Sequence[Row] = ()
    _states: list[_Held] = field(init=False)

    def __post_init__(self) -> None:
        self._states = [_Held(guard=guard) for guard in self.guards]
        for row in self.earlier:
            for state in self._states:
                state.remember(row)

    def after(self, row: Row) -> list[Alarm]:
        """Alarms that this row sets off: each once, until its condition has ceased to hold."""
        return [alarm for state in self._states if (alarm := state.after(row, self.start)) is not None]


@dataclass(kw_only=True)
class _Held:
    """One guard, with what it has to remember."""

    guard: Guard
    since: int | None = None
    rewards: deque[float] = field(default_factory=deque)
    first: float | None = None
    best: float | None = None
    told: bool = False
    unclear: bool = False

    def after(self, row: Row, start: int) -> Alarm | None:
        self.remember(row)
        settling = row.step <= start + self.guard.skip and self.guard.check != "non_finite"
        try:
            what = None if settling else self._holds(row)
        except UserError as error:
            # A metric that only comes with validation is missing at most steps; a misspelt one always is.
            return self._unclear(row, error)
        if what is None:
            self.since, self.told = None, False
            return None
        if self.since is None:
            width = self.guard.steps_in_a_row if self.guard.check == "reward_collapse" else 1
            self.since = max(start + 1, row.step - width + 1)
        long_enough = self.guard.check == "reward_collapse" or row.step - self.since + 1 >= self.guard.steps_in_a_row
        if not long_enough or self.told:
            return None
        self.told = True
        return Alarm(guard=self.guard, what=f"{what} {_steps(self.since, row.step)}", since=self.since)

    def remember(self, row: Row) -> None:
        reward = row.number(REWARD)
        if self.guard.check != "reward_collapse" or reward is None:
            return
        self.rewards.append(reward)
        if len(self.rewards) > self.guard.steps_in_a_row:
            self.rewards.popleft()
        if len(self.rewards) == self.guard.steps_in_a_row:
            mean = statistics.fmean(self.rewards)
            self.first = mean if self.first is None else self.first
            self.best = mean if self.best is None else max(self.best, mean)

    def _holds(self, row: Row) -> str | None:
        """What is wrong, or None."""
        guard, figures = self.guard, _figures(row)
        if guard.check == "non_finite":
            bad = non_finite(row)
            return f"{', '.join(bad)} {'is' if len(bad) == 1 else 'are'} not finite" if bad else None
        if guard.check == "reward_collapse":
            return self._collapsed()
        if guard.when is not None:
            return f"`{guard.when}` holds" if evaluate_gate(guard.when, figures) else None
        name, limit, above = {
            "kl_above": ("kl", guard.kl_above, True),
            "entropy_below": ("entropy", guard.entropy_below, False),
            "length_above": ("length", guard.length_above, True),
        }[guard.check]
        value = figures[name]
        assert limit is not None
        if value is None or (value <= limit if above else value >= limit):
            return None
        return f"{name} is {value:.4g}, {'above' if above else 'below'} {limit:.4g},"

    def _collapsed(self) -> str | None:
        assert self.guard.reward_collapse is not None
        if self.first is None or self.best is None:
            return None
        now, gained = statistics.fmean(self.rewards), self.best - self.first
        if gained <= 0 or self.best - now <= self.guard.reward_collapse * gained:
            return None
        return f"the mean reward fell to {now:.4g}, from {self.best:.4g} at best (it began at {self.first:.4g}),"

    def _unclear(self, row: Row, error: UserError) -> Alarm | None:
        self.since = None
        if self.unclear:
            return None
        self.unclear = True
        only_told = self.guard.model_copy(update={"policy": "warn"})
        what = f"`{self.guard.when}` could not be looked at {_steps(row.step, row.step)}: {error.what}. {error.remedy}"
        return Alarm(guard=only_told, what=what, since=row.step)


def _figures(row: Row) -> dict[str, Any]:
    divergences = [value for key in _KL if (value := row.number(key)) is not None]
    return {
        "step": row.step,
        "reward": row.number(REWARD),
        "kl": max(divergences, default=None),
        "entropy": row.number(_ENTROPY),
        "length": row.number(_LENGTH),
        "grad_norm": row.number(_GRADIENT),
        "learning_rate": row.number(_RATE),
        "step_seconds": row.number(STEP_SECONDS),
        "metric": dict(row.data),
    }


def _steps(first: int, last: int) -> str:
    return f"at step {last}" if first == last else f"at steps {first} to {last}"
