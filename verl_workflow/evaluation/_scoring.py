"""The reward function, called as verl calls it, and held to its contract."""

from __future__ import annotations

import asyncio
import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from verl_workflow.errors import ErrorCode, UserError
from verl_workflow.evaluation._rows import Row

if TYPE_CHECKING:
    from verl_workflow.spec import Reward

# Figures of the evaluation itself: a reward's key of the same name would pass for them in a gate.
RESERVED = frozenset({"rows", "artifact", "version", "registry"})


@dataclass(frozen=True, kw_only=True)
class Scored:
    """What the reward said of one answer: the score, and whatever else it returned."""

    score: float
    extra: Mapping[str, Any]


class Scorer:
    """Scores answers; a context manager. Async rewards of one call run together, all on one event loop."""

    def __init__(self, reward: Reward, code_dir: Path) -> None:
        from verl_workflow.code import load_function

        self._reward = reward
        self._function: Callable[..., Any] = load_function(
            reward.function, code_dir, error_code=ErrorCode.REWARD_INVALID
        )
        self._loop = asyncio.new_event_loop()

    def __enter__(self) -> Scorer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._loop.close()

    def score(self, rows: Sequence[Row], answers: Sequence[str]) -> list[Scored]:
        """The score of each answer.

        Raises:
            UserError(REWARD_INVALID): the reward raised, or returned neither a finite number nor a mapping with a
                finite ``score``; names the row.
        """
        values = [self._call(row, answer) for row, answer in zip(rows, answers, strict=True)]
        waiting = {place: value for place, value in enumerate(values) if inspect.isawaitable(value)}
        if waiting:
            results = self._loop.run_until_complete(_gathered(list(waiting.values())))
            for place, result in zip(waiting, results, strict=True):
                if isinstance(result, BaseException):
                    raise self._raised(rows[place], answers[place], result) from result
                values[place] = result
        return [self._checked(*each) for each in zip(rows, answers, values, strict=True)]

    def _call(self, row: Row, answer: str) -> Any:
        try:
            return self._function(
                data_source=row.data_source,
                solution_str=answer,
                ground_truth=row.ground_truth,
                extra_info=dict(row.extra_info),
                **self._reward.kwargs,
            )
        # It is the user's code: whatever it raises is told with its row.
        except Exception as error:
            raise self._raised(row, answer, error) from error

    def _checked(self, row: Row, answer: str, value: Any) -> Scored:
        extra: dict[str, Any] = {}
        score = value
        if isinstance(value, Mapping):
            if "score" not in value:
                raise self._invalid(row, answer, "the reward returned a dict without 'score'", value)
            extra = {str(name): item for name, item in value.items() if name != "score"}
            score = value["score"]
            taken = sorted(RESERVED & extra.keys())
            if taken:
                raise self._invalid(row, answer, f"the reward's key {taken[0]!r} is a figure of the evaluation", value)
        number = as_number(score)
        if number is None:
            raise self._invalid(row, answer, "the reward's score is no number", value)
        for name, item in {"score": number, **extra}.items():
            figure = as_number(item)
            if figure is not None and not math.isfinite(figure):
                raise self._invalid(row, answer, f"the reward's {name} is not finite", value)
        return Scored(score=number, extra=extra)

    def _raised(self, row: Row, answer: str, error: BaseException) -> UserError:
        return self._invalid(row, answer, f"the reward raised {type(error).__name__}: {error}", None)

    def _invalid(self, row: Row, answer: str, what: str, value: Any) -> UserError:
        return UserError(
            ErrorCode.REWARD_INVALID,
            f"{what}, on row {row.index} (data_source {row.data_source!r}, ground_truth {row.ground_truth!r}, "
            f"answer {answer[:80]!r})",
            where=self._reward.function,
            value=value,
            remedy="Return a finite float, or a dict with a finite 'score', for every answer.",
        )


def as_number(value: Any) -> float | None:
    """`value` as a float when it is a number of any kind (bool, numpy, torch scalar), else None."""
    if value is None or isinstance(value, (str, bytes)):
        return None
    try:
        return float(value)
    except (TypeError, ValueError):
        return None


async def _gathered(values: list[Any]) -> list[Any]:
    return await asyncio.gather(*values, return_exceptions=True)
