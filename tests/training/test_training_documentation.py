"""What docs/training.md says is what the classes say."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from verl_workflow.spec import FailureClass, VerlStage

PAGE = (Path(__file__).parents[2] / "docs/training.md").read_text()
BLOCKS = re.findall(r"```yaml\n(.*?)```", PAGE, re.DOTALL)
MINIMUM = {
    "train": "a.parquet",
    "validation": "b.parquet",
    "reward": {"function": "r.py:f"},
    "steps": 1,
    "batch_size": 4,
    "save_every": 1,
}


def fields(block: str) -> dict[str, Any]:
    """The fields of a verl stage that a block shows."""
    read = yaml.safe_load(block)
    found = read.get("train", read)
    return {key: value for key, value in found.items() if key not in {"kind", "matrix", "learning_rate", "rollouts"}}


@pytest.mark.parametrize("block", BLOCKS)
def test_what_the_page_writes_is_a_stage(block: str) -> None:
    VerlStage.model_validate({"name": "train", **MINIMUM, **fields(block)})


def test_the_page_has_each_class_of_failure() -> None:
    table = PAGE[PAGE.index("| class |") : PAGE.index("```yaml\n    retry:")]
    told = set(re.findall(r"`([a-z.]+)`", "".join(line.split("|")[1] for line in table.splitlines() if "|" in line)))
    assert told == {kind.value for kind in FailureClass} - {"cancelled"}


def test_the_page_shows_at_least_these_parts() -> None:
    shown = {key for block in BLOCKS for key in fields(block)}
    assert {"deadlines", "guards", "retry", "keep_best", "trackers"} <= shown
