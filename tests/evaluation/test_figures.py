from __future__ import annotations

import random

import pytest

from verl_workflow.evaluation._figures import difference, means
from verl_workflow.evaluation._scoring import Scored


def scored(scores: list[float]) -> list[Scored]:
    return [Scored(score=score, extra={}) for score in scores]


def test_means_take_keys_that_are_numbers_in_every_row() -> None:
    rows = [
        Scored(score=1.0, extra={"acc": True, "length": 3, "note": "x", "some": 1.0}),
        Scored(score=0.0, extra={"acc": False, "length": 5, "note": "y"}),
    ]
    assert means(rows) == {"score": 0.5, "acc": 0.5, "length": 4.0}


def test_the_interval_is_that_of_the_normal_approximation_for_many_rows() -> None:
    stream = random.Random(1)
    deltas = [stream.gauss(0.2, 1.0) for _ in range(2000)]
    found = difference(scored(deltas), scored([0.0] * len(deltas)))
    mean = sum(deltas) / len(deltas)
    spread = (sum((delta - mean) ** 2 for delta in deltas) / len(deltas)) ** 0.5
    half = 1.96 * spread / len(deltas) ** 0.5
    assert found["mean"] == pytest.approx(mean)
    assert found["low"] == pytest.approx(mean - half, abs=half * 0.05)
    assert found["high"] == pytest.approx(mean + half, abs=half * 0.05)


def test_it_is_paired_and_the_same_each_time() -> None:
    """Rows differ much, the two models by exactly 0.1 on each: unpaired, the interval would hold 0."""
    base = [float(number) for number in range(50)]
    found = difference(scored([number + 0.1 for number in base]), scored(base))
    assert found["low"] == pytest.approx(0.1)
    assert found["high"] == pytest.approx(0.1)
    other = scored([float(number % 7) for number in range(50)])
    assert difference(scored(base), other) == difference(scored(base), other)


def test_one_row_tells_nothing_about_spread() -> None:
    assert difference(scored([1.0]), scored([0.0])) == {"mean": 1.0, "low": None, "high": None}
