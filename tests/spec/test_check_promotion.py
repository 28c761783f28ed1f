"""A champion is replaced only by a candidate that was compared with it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from verl_workflow.spec import load


def pipeline(champion: str, promote: str = "") -> str:
    return (
        "version: 1\nname: p\nparams: {c: {type: string, default: night}}\nstages:\n"
        f"  e: {{kind: evaluate, model: ., data: rows.jsonl, reward: {{function: 'reward.py:score'}}{champion}}}\n"
        f"  p: {{kind: promote, registry: night, evaluation: '${{e}}'{promote}}}\n"
    )


@pytest.mark.parametrize(
    ("champion", "compared"),
    [("", "no champion"), (", champion: day", "the champion of day")],
)
def test_an_evaluation_that_meets_another_one_is_told_before_anything_is_trained(
    mistakes: Callable[..., list[str]], champion: str, compared: str
) -> None:
    [message] = mistakes(pipeline(champion))
    assert message.endswith(
        f"stages.p.registry: e compares with {compared}, so that no later run could replace the champion of night "
        "(got 'night'). Write `champion: night` in the stage e; while there is none, nothing is compared."
    )


@pytest.mark.parametrize(
    ("champion", "promote"), [(", champion: night", ""), ("", ", alias: newest"), (", champion: '${params.c}'", "")]
)
def test_the_one_that_is_met_and_another_alias_are_right(folder: Path, champion: str, promote: str) -> None:
    (folder / "p.yaml").write_text(pipeline(champion, promote))
    assert load("p.yaml").pipeline.stage("p").registry == "night"
