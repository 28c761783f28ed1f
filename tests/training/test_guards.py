from __future__ import annotations

from typing import Any

import pytest

from verl_workflow.spec._supervision import Guard
from verl_workflow.training._guards import Alarm, GuardedRows, in_force
from verl_workflow.training._metrics import Row


def row(step: int, **data: Any) -> Row:
    return Row(step=step, data={"timing_s/step": 1.0, **{key.replace("__", "/"): value for key, value in data.items()}})


def alarms(guard: Guard, rows: list[Row], **where: Any) -> list[tuple[int, Alarm]]:
    """(step at which it was told, alarm)."""
    guarded = GuardedRows(guards=[guard], **where)
    return [(each.step, alarm) for each in rows for alarm in guarded.after(each)]


def test_numbers_that_are_none_for_five_steps_are_told_once_with_the_first_of_them() -> None:
    rows = [row(step, actor__grad_norm=None if step > 3 else 0.1) for step in range(1, 12)]
    [(step, alarm)] = alarms(Guard(non_finite=True), rows)
    assert (step, alarm.since) == (8, 4)
    assert alarm.what == "actor/grad_norm is not finite at steps 4 to 8"


def test_a_step_that_is_right_again_begins_the_count_anew() -> None:
    bad = [1, 2, 3, 4, 6, 7, 8, 9]
    rows = [row(step, actor__pg_loss=None if step in bad else 0.1) for step in range(1, 10)]
    assert alarms(Guard(non_finite=True), rows) == []


@pytest.mark.parametrize(
    ("guard", "figures", "said"),
    [
        (Guard(kl_above=0.5), {"actor__kl_loss": 0.1, "actor__ppo_kl": 0.9}, "kl is 0.9, above 0.5, at step 4"),
        (Guard(entropy_below=0.2), {"actor__entropy": 0.05}, "entropy is 0.05, below 0.2, at step 4"),
        (Guard(length_above=100.0), {"response_length__mean": 140.5}, "length is 140.5, above 100, at step 4"),
        (Guard(when="reward < 0.1 and step > 3"), {"critic__score__mean": 0.0}, "`reward < 0.1 and step > 3` holds"),
        (Guard(when='metric["a/b"] == 2'), {"a__b": 2}, '`metric["a/b"] == 2` holds at step 4'),
    ],
)
def test_a_figure_beyond_its_limit_is_told_and_one_at_it_is_not(
    guard: Guard, figures: dict[str, float], said: str
) -> None:
    [(_, alarm)] = alarms(guard, [row(4, **figures)])
    assert said in alarm.what
    at_limit = {
        "actor__kl_loss": 0.5,
        "actor__entropy": 0.2,
        "response_length__mean": 100.0,
        "critic__score__mean": 0.1,
    }
    assert alarms(guard, [row(4, **at_limit, a__b=1)]) == []


def test_steps_after_a_resume_are_passed_over_but_for_numbers_that_are_none() -> None:
    rows = [row(step, actor__entropy=0.0, actor__grad_norm=None) for step in range(11, 16)]
    assert [step for step, _ in alarms(Guard(entropy_below=0.5), rows, start=10)] == [14]
    assert [step for step, _ in alarms(Guard(entropy_below=0.5, skip=0), rows, start=10)] == [11]
    assert [step for step, _ in alarms(Guard(non_finite=True, steps=2), rows, start=10)] == [12]


def test_a_condition_has_to_hold_for_as_many_steps_as_asked() -> None:
    kl = {4: 1.0, 5: 0.0, 6: 1.0, 7: 1.0, 8: 1.0, 9: 0.0, 10: 1.0, 11: 1.0, 12: 1.0}
    rows = [row(step, actor__ppo_kl=value) for step, value in kl.items()]
    found = alarms(Guard(kl_above=0.5, steps=3), rows)
    assert [(step, alarm.since) for step, alarm in found] == [(8, 6), (12, 10)]


def collapse(rewards: list[float], **where: Any) -> list[tuple[int, int]]:
    rows = [row(step, critic__score__mean=reward) for step, reward in enumerate(rewards, where.get("start", 0) + 1)]
    guard = Guard(reward_collapse=0.5, steps=2)
    return [(step, alarm.since) for step, alarm in alarms(guard, rows, **where)]


def test_a_reward_that_loses_half_of_what_it_gained_has_collapsed() -> None:
    rising = [-1.0, -1.0, -0.5, 0.0, 1.0, 1.0]
    assert collapse(rising) == []
    assert collapse([*rising, 0.5, 0.2]) == []
    assert collapse([*rising, 0.2, -0.6]) == [(8, 7)]


def test_a_reward_that_never_rose_has_not_collapsed() -> None:
    assert collapse([0.0, 0.5, 0.0, -0.5, -1.0, -1.0, -1.0]) == []


def test_what_earlier_attempts_had_gained_counts() -> None:
    earlier = [row(step, critic__score__mean=reward) for step, reward in enumerate([0.0, 0.0, 1.0, 1.0], 1)]
    assert collapse([0.1, 0.1, 0.1, 0.1, 0.1], start=4, earlier=earlier) == [(8, 7)]
    assert collapse([0.1, 0.1, 0.1, 0.1, 0.1], start=4) == []


def test_an_expression_over_a_metric_that_is_not_there_is_told_once_and_stops_nothing() -> None:
    guard = Guard(when='metric["actor/kl_los"] > 1', policy="stop")
    rows = [row(step, actor__kl_loss=5.0) for step in range(4, 9)]
    [(step, alarm)] = alarms(guard, rows)
    assert (step, alarm.guard.policy) == (4, "warn")
    assert "there is no metric.actor/kl_los" in alarm.what
    assert "Did you mean metric.actor/kl_loss?" in alarm.what


def test_an_expression_over_a_validation_metric_holds_when_it_comes() -> None:
    guard = Guard(when='metric["val/acc"] < 0.5')
    rows = [row(4), row(5, val__acc=0.9), row(6), row(7, val__acc=0.1)]
    found = alarms(guard, rows)
    assert [(step, alarm.guard.policy) for step, alarm in found] == [(4, "warn"), (7, "stop")]


def test_numbers_are_watched_whether_it_is_written_or_not() -> None:
    kl, own = Guard(kl_above=1.0), Guard(non_finite=True, steps=1, policy="rollback")
    assert in_force([]) == (Guard(non_finite=True),)
    assert in_force([kl]) == (Guard(non_finite=True), kl)
    assert in_force([own, kl]) == (own, kl)
