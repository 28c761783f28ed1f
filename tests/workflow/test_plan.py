from __future__ import annotations

from typing import Any

import pytest

from verl_workflow.errors import UserError
from verl_workflow.workflow import Plan, RetryPolicy, Step


def step(name: str, *after: str) -> Step:
    return Step(name=name, call=len, after=after)


def test_steps_come_behind_what_they_wait_for_and_otherwise_as_given() -> None:
    plan = Plan(steps=(step("d", "c", "b"), step("c", "a"), step("b", "a"), step("a"), step("e")))
    assert [each.name for each in plan.in_order()] == ["a", "c", "b", "d", "e"]


@pytest.mark.parametrize(
    ("steps", "words"),
    [
        ((step("a"), step("a")), "two steps have this name"),
        ((step("prepare"), step("b", "prepera")), "Did you mean prepare"),
        ((step("a", "b"), step("b", "a"), step("c")), "a, b: these steps wait for each other"),
        ((step("a", "a"),), "wait for each other"),
        ((step("../a"),), "cannot be the name"),
        ((step("a..b"),), "cannot be the name"),
    ],
)
def test_plans_that_cannot_be_run_are_refused(steps: tuple[Step, ...], words: str) -> None:
    with pytest.raises(UserError, match=words):
        Plan(steps=steps)


def test_a_chain_of_ten_thousand_steps_is_ordered() -> None:
    chain = tuple(step(f"s{n}", *([f"s{n - 1}"] if n else [])) for n in range(10_000))
    assert Plan(steps=chain[::-1]).in_order() == list(chain)


def test_pauses_double_up_to_five_minutes() -> None:
    policy = RetryPolicy(backoff_s=2.0)
    assert [policy.pause_s(n) for n in (1, 2, 3, 20, 100_000)] == [2.0, 4.0, 8.0, 300.0, 300.0]


def test_pauses_of_any_growth_are_numbers() -> None:
    assert RetryPolicy(backoff_s=0.01, factor=1e200).pause_s(5) == 300.0
    assert RetryPolicy(backoff_s=0.0, factor=1e200).pause_s(5) == 0.0


@pytest.mark.parametrize("field", ["backoff_s", "factor", "longest_s"])
@pytest.mark.parametrize("wrong", [float("nan"), float("inf"), "2"])
def test_pauses_that_no_journal_can_hold_are_refused(field: str, wrong: Any) -> None:
    with pytest.raises(ValueError, match=f"{field} has to be a finite number"):
        RetryPolicy(**{field: wrong})
