"""Whether a training is tried again after a failure, and with what settings: a pure function of what was recorded."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from verl_workflow.spec._failure_class import FailureClass
from verl_workflow.spec._training import VerlStage
from verl_workflow.training._changes import next_changes
from verl_workflow.training._history import Outcome
from verl_workflow.workflow import RetryPolicy

# Waiting for room costs nothing but time.
_FOR_ROOM = 10


@dataclass(frozen=True, kw_only=True)
class Decision:
    """What follows a failure.

    Attributes:
        again: whether another attempt is made. why: a sentence that says so, and what it costs.
        changes: settings of the next attempt that differ from the written ones.
    """

    again: bool
    why: str
    changes: Mapping[str, Any] = field(default_factory=dict)


def decide(spec: VerlStage, history: Sequence[Outcome], chosen: Mapping[str, Any]) -> Decision:
    """What follows the last attempt of `history`, which failed.

    Args:
        history: all attempts at the stage, in order.
        chosen: verl's settings as they are written, without changes.
    """
    last = history[-1]
    assert last.failure is not None
    kind = last.failure.kind
    before = last.changes
    if last.failure.final:
        return Decision(again=False, why="Another attempt would end in the same way.")
    if last.failure.preempted:
        return Decision(again=True, why="A preemption costs no attempt.", changes=before)
    if loop := _crash_loop(history):
        return Decision(again=False, why=loop)
    changes = next_changes(spec, kind, chosen, before)
    recent = [outcome for outcome in history if outcome.epoch == last.epoch]
    failed = [outcome for outcome in recent if _costs(outcome)]
    alike = [outcome for outcome in recent if outcome.failure is not None and outcome.failure.kind is kind]
    budget = _budget(spec, kind, can_change=changes != before)
    if sum(not outcome.failure.preempted for outcome in alike if outcome.failure is not None) > budget:
        return Decision(again=False, why=_spent(kind, budget))
    if kind is not FailureClass.CAPACITY and len(failed) >= spec.retry.attempts:
        return Decision(again=False, why=f"All {spec.retry.attempts} attempts (retry.attempts) have failed.")
    return Decision(again=True, why=_told(before, changes), changes=changes)


def changes_after(spec: VerlStage, history: Sequence[Outcome], chosen: Mapping[str, Any]) -> Mapping[str, Any]:
    """The changes that the attempt after those of `history` runs with."""
    if not history:
        return {}
    last = history[-1]
    if last.failure is None or last.failure.preempted:
        return last.changes
    return next_changes(spec, last.failure.kind, chosen, last.changes)


def longest_pause(spec: VerlStage, before: int) -> float:
    """Seconds that may pass between an attempt, with `before` ones before it, and the next."""
    return RetryPolicy(backoff_s=spec.retry.backoff).pause_s(before + 1)


def exhausted(spec: VerlStage, history: Sequence[Outcome], epoch: int) -> str | None:
    """Why no attempt may begin although nothing was decided after the last one, or None.

    An attempt whose process was lost, or stopped at the stage's time limit, leaves no decision.
    """
    failed = [outcome for outcome in history if outcome.epoch == epoch and _costs(outcome)]
    if len(failed) >= spec.retry.attempts and failed[-1].ended is None:
        return (
            f"all {spec.retry.attempts} attempts have failed, the last one by the loss of its process or the stage's "
            "time limit"
        )
    return None


def _costs(outcome: Outcome) -> bool:
    """Whether it counts against `attempts`: it failed, or was lost alone (not with its driver)."""
    if outcome.failure is None:
        return outcome.ended is None
    return not outcome.failure.preempted and outcome.failure.kind is not FailureClass.CAPACITY


def _budget(spec: VerlStage, kind: FailureClass, *, can_change: bool) -> int:
    """How many failures of the class are tried again."""
    if kind in spec.retry.budgets:
        return spec.retry.budgets[kind]
    further = spec.retry.attempts - 1
    if can_change or not further:
        return further
    rolls_back = any(guard.policy == "rollback" for guard in spec.guards)
    return {
        FailureClass.INFRASTRUCTURE: further,
        FailureClass.STALL: further,
        FailureClass.CHECKPOINT: further,
        FailureClass.CAPACITY: _FOR_ROOM,
        FailureClass.MEMORY_HOST: 1,
        FailureClass.TRACKER: 1,
        FailureClass.UNKNOWN: 1,
        FailureClass.NUMERIC: 1 if rolls_back else 0,
    }.get(kind, 0)


def _crash_loop(history: Sequence[Outcome]) -> str | None:
    """Two failures alike at the same step, after having moved: a third would end there too."""
    if len(history) < 2:
        return None
    last, before = history[-1], history[-2]
    assert last.failure is not None
    if before.failure is None or before.failure.kind is not last.failure.kind or before.reached != last.reached:
        return None
    if last.reached <= last.start or last.changes != before.changes:
        return None
    return (
        f"It has failed of the same ({last.failure.kind.value}) after the same step, {last.reached}, twice: a crash "
        "loop. Look at what is special about the next step, its rows first."
    )


def _spent(kind: FailureClass, budget: int) -> str:
    if budget == 0:
        return f"A failure of class {kind.value} is not tried again."
    times = "once" if budget == 1 else f"{budget} times"
    return f"A failure of class {kind.value} is tried again {times} (retry.budgets), which has been done."


def _told(before: Mapping[str, Any], changes: Mapping[str, Any]) -> str:
    new = {key: value for key, value in changes.items() if before.get(key) != value}
    if not new:
        return "Another attempt follows."
    said = ", ".join(f"{key}={value:g}" for key, value in new.items())
    return f"Another attempt follows, as the stage allows (retry.changes) with {said}."
