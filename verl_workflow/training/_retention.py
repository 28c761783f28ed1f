"""Which checkpoints are kept: the newest ones, and the best by a metric, over all attempts."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from verl_workflow.spec._training import KeepBest, VerlStage
from verl_workflow.training._checkpoints import Checkpoint, checkpoints, fault
from verl_workflow.training._discard import discard, finish_discarding
from verl_workflow.training._metrics import REWARD, Row


@dataclass(frozen=True, kw_only=True)
class Best:
    """The best checkpoint, and the figure that makes it so."""

    checkpoint: Checkpoint
    metric: str
    value: float

    def to_json(self) -> dict[str, Any]:
        """``{"path", "step", "metric", "value"}``."""
        place = {"path": str(self.checkpoint.path), "step": self.checkpoint.step}
        return {**place, "metric": self.metric, "value": self.value}


@dataclass(kw_only=True)
class Retention:
    """Prunes while a training runs, once for each checkpoint and not before the figures of its step are there.

    Attributes:
        root: where checkpoints lie. prune: deletes what need not be kept.
    """

    root: Path
    prune: Callable[[], None]
    _seen: int = field(default=0, init=False)

    def after(self, step: int) -> None:
        """Prune if a checkpoint of this step, or one before, has come since the last time."""
        newest = max((found.step for found in checkpoints(self.root) if found.step <= step), default=0)
        if newest > self._seen:
            self._seen = newest
            self.prune()


def figures_of(steps: Iterable[int], rows: Sequence[Row], metric: str) -> dict[int, float]:
    """The steps' figures; a step at which nothing was measured has the newest figure before it, or none."""
    key = REWARD if metric == "reward" else metric
    measured = {row.step: figure for row in rows if (figure := row.number(key)) is not None}
    found = {}
    for step in steps:
        before = [each for each in measured if each <= step]
        if before:
            found[step] = measured[max(before)]
    return found


def best_steps(steps: Iterable[int], rows: Sequence[Row], keep: KeepBest) -> list[int]:
    """The `count` best of the steps, best first; of equal ones the later is better."""
    sign = 1 if keep.mode == "max" else -1
    ranked = sorted(
        ((sign * figure, step) for step, figure in figures_of(steps, rows, keep.metric).items()), reverse=True
    )
    return [step for _, step in ranked[: keep.count]]


def best_of(
    root: Path,
    rows: Sequence[Row],
    keep: KeepBest,
    *,
    world_size: int,
    roles: Sequence[str],
    identity: Mapping[str, Any],
) -> Best | None:
    """The best checkpoint that can be resumed from."""
    there = {found.step: found for found in checkpoints(root)}
    for step in best_steps(there, rows, keep.model_copy(update={"count": len(there)})):
        if fault(there[step], world_size=world_size, roles=roles, identity=identity) is None:
            value = figures_of([step], rows, keep.metric)[step]
            return Best(checkpoint=there[step], metric=keep.metric, value=value)
    return None


def handed_on(spec: VerlStage, last: Checkpoint, best: Best | None, warn: Callable[[str], None]) -> Checkpoint:
    """The checkpoint whose model is handed on."""
    if spec.hand_on == "last":
        return last
    if best is None:
        assert spec.keep_best is not None, "the stage was checked"
        warn(f"{spec.keep_best.metric} (keep_best.metric) was never measured: the last step's model is handed on")
        return last
    return best.checkpoint


def kept_steps(steps: Sequence[int], *, keep: int, best: Sequence[int] = ()) -> set[int]:
    """Which of the steps, in order, are kept."""
    return set(steps[-keep:]) | (set(best) & set(steps))


def prune(root: Path, *, keep: int, keep_best: KeepBest | None, rows: Sequence[Row]) -> None:
    """Delete the checkpoints that need not be kept.

    Safe while a training saves a further one, and when it is killed in between: what it has begun to delete has another
    name already. A checkpoint is not judged before the figures of its step are there; until then it is one of the
    newest.

    Args:
        rows: metrics of all attempts.
    """
    finish_discarding(root)
    found = checkpoints(root)
    steps = [one.step for one in found]
    logged = rows[-1].step if rows else 0
    best = best_steps([step for step in steps if step <= logged], rows, keep_best) if keep_best is not None else ()
    staying = kept_steps(steps, keep=keep, best=best)
    for checkpoint in found:
        if checkpoint.step not in staying:
            discard(checkpoint.path)
