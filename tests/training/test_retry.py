from __future__ import annotations

from typing import Any

import pytest
from _training_pieces import stage

from verl_workflow.spec import Change, FailureClass
from verl_workflow.training._check import _likely
from verl_workflow.training._history import Outcome
from verl_workflow.training._retry import Decision, changes_after, decide, exhausted
from verl_workflow.training.failures import Failure


def failed(attempt: int, kind: str, *, epoch: int = 1, start: int = 0, reached: int = 0, **more: Any) -> Outcome:
    flags = {name: more.pop(name) for name in ("preempted", "final") if name in more}
    failure = Failure(kind=FailureClass(kind), what="it broke", **flags)
    times = {"began": 1.0, "ended": 2.0}
    return Outcome(attempt=attempt, epoch=epoch, start=start, reached=reached, failure=failure, **times, **more)


def lost(attempt: int, *, epoch: int = 1) -> Outcome:
    return Outcome(attempt=attempt, epoch=epoch, began=1.0)


def after(history: list[Outcome], **changes: Any) -> Decision:
    spec = stage(**changes)
    return decide(spec, history, _likely(spec, None))


@pytest.mark.parametrize(
    ("kind", "further"),
    [
        ("infrastructure", 3),
        ("stall", 3),
        ("checkpoint", 3),
        ("memory.host", 1),
        ("tracker", 1),
        ("unknown", 1),
        ("configuration", 0),
        ("data", 0),
        ("reward", 0),
        ("disk", 0),
        ("memory.gpu", 0),
        ("memory.save", 0),
        ("numeric", 0),
        ("cancelled", 0),
    ],
)
def test_each_class_has_its_own_number_of_further_attempts(kind: str, further: int) -> None:
    history: list[Outcome] = []
    made = 0
    while True:
        history.append(failed(len(history) + 1, kind, start=made, reached=made + 1))
        if not after(history, retry={"attempts": 4}).again:
            break
        made += 1
    assert made == further


def test_attempts_are_counted_over_all_classes() -> None:
    history = [failed(1, "infrastructure", reached=1), failed(2, "stall", reached=2)]
    assert after(history).again
    history.append(failed(3, "checkpoint", reached=3))
    decision = after(history)
    assert not decision.again
    assert "All 3 attempts (retry.attempts) have failed" in decision.why


def test_a_budget_that_is_written_wins_over_the_usual_one() -> None:
    one = [failed(1, "infrastructure", reached=1)]
    assert not after(one, retry={"budgets": {"infrastructure": 0}}).again
    assert after([failed(1, "disk", reached=1)], retry={"budgets": {"disk": 1}}).again


def test_a_preemption_costs_no_attempt() -> None:
    history = [failed(n, "infrastructure", reached=n, preempted=True) for n in range(1, 10)]
    assert after(history).again
    assert after([*history, failed(10, "infrastructure", reached=10), failed(11, "infrastructure", reached=11)]).again


def test_waiting_for_room_costs_no_attempt_and_ends_all_the_same() -> None:
    history = [failed(n, "capacity") for n in range(1, 11)]
    assert after(history).again
    assert after([*history, failed(11, "infrastructure")]).again
    assert not after([*history, failed(11, "capacity")]).again


def test_what_was_lost_with_an_earlier_driver_does_not_count() -> None:
    history = [*(lost(n, epoch=n) for n in range(1, 6)), failed(6, "infrastructure", epoch=6, reached=1)]
    assert after(history).again
    assert exhausted(stage(), history, epoch=7) is None


def test_attempts_that_leave_no_decision_are_bounded_too() -> None:
    spec = stage(retry={"attempts": 2})
    assert exhausted(spec, [lost(1)], epoch=1) is None
    assert "all 2 attempts have failed" in str(exhausted(spec, [lost(1), lost(2)], epoch=1))
    assert exhausted(spec, [lost(1), lost(2)], epoch=2) is None


def test_resuming_a_run_gives_it_its_attempts_anew() -> None:
    history = [failed(n, "infrastructure", reached=n) for n in range(1, 4)]
    assert not after(history).again
    assert after([*history, failed(4, "infrastructure", epoch=2, reached=9)]).again


def test_the_same_end_at_the_same_step_twice_is_a_crash_loop() -> None:
    loop = [failed(1, "unknown", reached=5), failed(2, "unknown", start=4, reached=5)]
    decision = after(loop, retry={"attempts": 9, "budgets": {"unknown": 9}})
    assert not decision.again
    assert "a crash loop" in decision.why
    assert after([loop[0], failed(2, "infrastructure", start=4, reached=5)], retry={"attempts": 9}).again
    never_moved = [failed(1, "infrastructure"), failed(2, "infrastructure")]
    assert after(never_moved).again


def test_a_failure_that_is_final_is_not_tried_again() -> None:
    assert not after([failed(1, "stall", final=True)]).again


def gpu_memory(**change: Any) -> dict[str, Any]:
    return {"attempts": 9, "changes": [Change(against="memory.gpu", setting="micro_batch", **change)]}  # type: ignore[arg-type]


def test_a_smaller_micro_batch_is_tried_until_it_cannot_get_smaller() -> None:
    key = "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu"
    spec = stage(retry=gpu_memory())
    chosen = _likely(spec, None)
    assert chosen[key] == 16
    sizes, changes = [], {}
    history: list[Outcome] = []
    while True:
        history.append(failed(len(history) + 1, "memory.gpu", changes=changes))
        decision = decide(spec, history, chosen)
        if not decision.again:
            break
        changes = dict(decision.changes)
        sizes.append(changes[key])
        assert f"{key}={changes[key]}" in decision.why
        assert changes_after(spec, history, chosen) == changes
    assert sizes == [8, 4, 2, 1]


def test_a_micro_batch_stays_a_divisor_and_above_its_bound() -> None:
    key = "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu"
    spec = stage(batch_size=6, rollouts=3, retry=gpu_memory(at_least=3.0))
    chosen = _likely(spec, None)
    assert chosen[key] == 18
    first = changes_after(spec, [failed(1, "memory.gpu")], chosen)
    second = changes_after(spec, [failed(2, "memory.gpu", changes=first)], chosen)
    third = changes_after(spec, [failed(3, "memory.gpu", changes=second)], chosen)
    assert (first[key], second[key]) == (9, 3)
    assert third == second
    assert not decide(spec, [failed(3, "memory.gpu", changes=second)], chosen).again


def test_tokens_in_a_pass_never_get_fewer_than_one_answer_has() -> None:
    key = "actor_rollout_ref.actor.ppo_max_token_len_per_gpu"
    dynamic = {"actor_rollout_ref.actor.use_dynamic_bsz": True}
    spec = stage(max_prompt_length=3000, max_response_length=3000, overrides=dynamic, retry=gpu_memory(), save_every=2)
    chosen = _likely(spec, None)
    first = changes_after(spec, [failed(1, "memory.gpu")], chosen)
    second = changes_after(spec, [failed(2, "memory.gpu", changes=first)], chosen)
    assert (first[key], second[key]) == (8192, 6000)


def test_other_settings_have_a_bound_of_their_own() -> None:
    retry = {
        "changes": [
            Change(against="memory.gpu", setting="gpu_memory_utilization", times=0.8, at_least=0.3),  # type: ignore[arg-type]
            Change(against="numeric", setting="learning_rate"),  # type: ignore[arg-type]
        ]
    }
    spec = stage(retry=retry, learning_rate=8e-6)
    chosen = _likely(spec, None)
    share, seen = "actor_rollout_ref.rollout.gpu_memory_utilization", []
    changes: Any = {}
    for _ in range(5):
        changes = changes_after(spec, [failed(1, "memory.gpu", changes=changes)], chosen)
        seen.append(round(changes[share], 3))
    assert seen == [0.4, 0.32, 0.3, 0.3, 0.3]
    rate, seen, changes = "actor_rollout_ref.actor.optim.lr", [], {}
    for _ in range(5):
        changes = changes_after(spec, [failed(1, "numeric", changes=changes)], chosen)
        seen.append(changes[rate])
    assert seen == pytest.approx([4e-6, 2e-6, 1e-6, 1e-6, 1e-6])


def test_nothing_changes_unless_the_stage_allows_it() -> None:
    spec = stage()
    assert changes_after(spec, [failed(1, "memory.gpu")], _likely(spec, None)) == {}


def test_changes_stay_in_force_for_later_attempts() -> None:
    spec = stage(retry=gpu_memory())
    chosen = _likely(spec, None)
    first = changes_after(spec, [failed(1, "memory.gpu")], chosen)
    assert changes_after(spec, [failed(1, "memory.gpu"), failed(2, "stall", changes=first)], chosen) == first
    assert changes_after(spec, [failed(2, "infrastructure", changes=first, preempted=True)], chosen) == first
    assert changes_after(spec, [lost(1)], chosen) == {}
