"""Figures over rows: means, and how sure the difference of two models is."""

from __future__ import annotations

from collections.abc import Sequence

from verl_workflow.evaluation._scoring import Scored, as_number

_RESAMPLES = 10_000
_CELLS = 2_000_000
_SEED = 0


def means(scored: Sequence[Scored]) -> dict[str, float]:
    """The mean of ``score`` and of each further key whose value is a number in every row."""
    columns = {"score": [each.score for each in scored]}
    for name in scored[0].extra:
        numbers = [as_number(each.extra.get(name)) for each in scored]
        known = [number for number in numbers if number is not None]
        if len(known) == len(numbers):
            columns[name] = known
    return {name: sum(column) / len(column) for name, column in columns.items()}


def difference(candidate: Sequence[Scored], champion: Sequence[Scored]) -> dict[str, float | None]:
    """Candidate's score minus champion's: ``mean``, and ``low`` and ``high`` of its 95 % interval.

    The interval is a paired percentile bootstrap over rows, 10,000 resamples with a fixed seed: the same scores give
    the same interval. One row says nothing about spread: `low` and `high` are None then.
    """
    import numpy as np

    deltas = np.array([a.score - b.score for a, b in zip(candidate, champion, strict=True)])
    mean = float(deltas.mean())
    if len(deltas) < 2:
        return {"mean": mean, "low": None, "high": None}
    stream = np.random.default_rng(_SEED)
    share = np.full(len(deltas), 1 / len(deltas))
    resampled = np.empty(_RESAMPLES)
    # A resample is how often each row is drawn, a number a row: made in chunks, to bound memory.
    chunk = max(1, _CELLS // len(deltas))
    for start in range(0, _RESAMPLES, chunk):
        size = min(chunk, _RESAMPLES - start)
        counts = stream.multinomial(len(deltas), share, size=size)
        resampled[start : start + size] = counts @ deltas / len(deltas)
    low, high = np.percentile(resampled, [2.5, 97.5])
    return {"mean": mean, "low": float(low), "high": float(high)}
