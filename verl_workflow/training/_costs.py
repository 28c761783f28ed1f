"""What a stage's attempts have cost, and what of it was lost."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from verl_workflow.training import _checkpoints, _metrics
from verl_workflow.training._history import Outcome, outcomes


@dataclass(frozen=True, kw_only=True)
class Spent:
    """Hours of verl's processes, times the accelerators that each held; on the CPU hours alone.

    Attributes:
        used: in all. wasted: for steps that were trained again, or that no checkpoint holds, and for attempts that
            trained none; what an attempt took to start counts as its steps do.
        gpus: the most that an attempt held; 0 on the CPU.
    """

    used: float
    wasted: float
    gpus: int


def spent(attempts: Sequence[Outcome], *, running: bool = False) -> Spent:
    """What the attempts at a stage have cost, in their order.

    Args:
        running: whether the last one goes on: nothing of it is lost yet.
    """
    used = wasted = 0.0
    for index, attempt in enumerate(attempts):
        hours = attempt.trained_s * max(1, attempt.gpus) / 3600
        used += hours
        if running and index == len(attempts) - 1:
            continue
        steps = attempt.reached - attempt.start
        # A rollback may go back behind more than one attempt.
        held = min((later.start for later in attempts[index + 1 :] if later.trained_s > 0), default=attempt.saved)
        kept = min(max(held - attempt.start, 0), steps)
        wasted += hours * (1 - kept / steps) if steps > 0 else hours
    return Spent(used=used, wasted=wasted, gpus=max((attempt.gpus for attempt in attempts), default=0))


def known_attempts(stage_dir: Path) -> list[Outcome]:
    """Outcomes of all attempts at a verl stage; of those whose process was lost or still runs, what their files tell.

    Args:
        stage_dir: ``<artifacts>/runs/<run>/stages/<stage>``.
    """
    found = outcomes(stage_dir)
    whole = [checkpoint.step for checkpoint in _checkpoints.checkpoints(stage_dir / "checkpoints")]
    return [
        _seen(stage_dir, outcome, [*whole, *(later.start for later in found[index + 1 :])])
        if outcome.ended is None
        else outcome
        for index, outcome in enumerate(found)
    ]


def _seen(stage_dir: Path, outcome: Outcome, whole: Sequence[int]) -> Outcome:
    metrics = stage_dir / "attempts" / f"{outcome.attempt:03d}" / _metrics.FILE_NAME
    steps = [row.step for row in _metrics.merge([metrics]) if row.trained]
    if not steps:
        return outcome
    return replace(
        outcome,
        start=min(steps) - 1,
        reached=max(steps),
        saved=max((step for step in whole if step <= max(steps)), default=0),
        trained_s=max(0.0, metrics.stat().st_mtime - outcome.began),
    )
