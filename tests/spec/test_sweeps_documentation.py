"""What docs/sweeps.md says can be loaded, and is as it says."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from textwrap import indent

import pytest

from verl_workflow.pipeline import define
from verl_workflow.spec import Document, load

Loads = Callable[..., Document]
PAGE = (Path(__file__).parents[2] / "docs/sweeps.md").read_text()
CHAIN, SWEEP, SEEDS, EXTENDING = re.findall(r"```yaml\n(.*?)```", PAGE, re.DOTALL)
HEAD = """\
version: 1
name: sums
model: {builtin: tiny}
params: {from: {type: string, default: ""}, steps: {type: integer, default: 50}}
stages:
"""


@pytest.fixture
def loaded(tmp_path: Path) -> Loads:
    (tmp_path / "reward.py").write_text(
        "".join(
            f"def {name}(data_source, solution_str, ground_truth, extra_info=None):\n    return 0.0\n\n\n"
            for name in ("format", "right")
        )
    )
    (tmp_path / "questions.jsonl").write_text(
        "".join(f'{{"question": "{number} + 1 =", "answer": "{number + 1}"}}\n' for number in range(20))
    )

    def load_block(block: str, **params: object) -> Document:
        (tmp_path / "sums.yaml").write_text(HEAD + indent(block, "  "))
        document = load(tmp_path / "sums.yaml", params)
        define(document, storage=str(tmp_path / "storage"))
        return document

    return load_block


def test_the_chain(loaded: Loads) -> None:
    assert loaded(CHAIN).pipeline.stage("train").needs() == {"warm_up", "hard"}


def test_the_sweep(loaded: Loads) -> None:
    members = loaded(SWEEP).pipeline.members("train")
    assert [(stage.learning_rate, stage.rollouts) for stage in members] == [(1e-6, 4), (1e-6, 8), (5e-6, 8)]
    assert all(stage.failures == "tolerate" for stage in members)


def test_the_choice_by_another_stages_figure(loaded: Loads) -> None:
    pipeline = loaded(SEEDS).pipeline
    assert [stage.seed for stage in pipeline.members("train")] == [1, 2, 3]
    assert pipeline.stage("best").needs() == {"train", "evaluate"}


def test_the_page_says_how_the_params_are_declared_and_given(loaded: Loads) -> None:
    assert HEAD.splitlines()[3] in PAGE.replace("`", "")
    assert loaded(EXTENDING).pipeline.stage("train").extends == ""
    assert loaded(EXTENDING, **{"from": "night-1", "steps": 100}).pipeline.stage("train").extends == "night-1"
