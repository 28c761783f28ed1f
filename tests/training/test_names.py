from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from verl_workflow.training._names import StageName, stage_of_group, stage_of_holder, stage_of_job
from verl_workflow.training._owner import is_later

STAGE = StageName(run_id="night: 1", incarnation="0123456789abcdef", stage="train-1")


def test_what_is_named_after_a_stage_is_known_to_be_its_own() -> None:
    assert stage_of_holder(STAGE.holder) == STAGE
    assert stage_of_group(f"{STAGE.groups}3.1") == STAGE
    assert stage_of_job(STAGE.job("2.10")) == (STAGE, "2.10")


@pytest.mark.parametrize(
    "text", ["", "train", "a:b:c:d", "held_groups:a:b", "verl_training:a:b:c:x", "global_poolverl:0"]
)
def test_nothing_else_is(text: str) -> None:
    assert (stage_of_holder(text), stage_of_group(text), stage_of_job(text)) == (None, None, None)


def test_a_run_of_the_same_id_that_was_deleted_is_another(context: Callable[..., Any]) -> None:
    one = StageName.of(context())
    other = StageName.of(context(records="runs/run/fedcba9876543210"))
    assert (one.run_id, one.stage) == (other.run_id, other.stage) == ("run", "train")
    assert one.holder != other.holder


@pytest.mark.parametrize(
    ("one", "other", "later"),
    [("1.2", "1.1", True), ("2.1", "1.9", True), ("1.10", "1.9", True), ("1.1", "1.1", False), ("", "1.1", False)],
)
def test_attempts_are_ordered_by_epoch_and_number(one: str, other: str, later: bool) -> None:
    assert is_later(one, other) is later
    assert is_later("1.1", "")
