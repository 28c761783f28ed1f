"""A run whose machine is about to end: its trainings save first."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

from verl_workflow.training import _metrics
from verl_workflow.training._handover import ask
from verl_workflow.training._history import outcomes

_POLL_SECONDS = 0.2


def ask_to_save(run_dir: Path, epoch: int) -> list[Path]:
    """Ask each training of a run that has something to save to do so and to end.

    Args:
        run_dir: ``<artifacts>/runs/<run>``.
        epoch: of the driver: trainings of earlier ones are gone, whatever their records say.

    Returns:
        The folders of the stages that were asked; they have ended when `all_saved` says so.
    """
    asked = []
    for stage_dir in sorted(run_dir.glob("stages/*")):
        if (attempt_dir := _running(stage_dir, epoch)) is None:
            continue
        if any(row.trained for row in _metrics.merge([attempt_dir / _metrics.FILE_NAME])):
            ask(attempt_dir)
            asked.append(stage_dir)
    return asked


def all_saved(stage_dirs: Sequence[Path], epoch: int, seconds: float) -> bool:
    """Whether the trainings that were asked have ended, within `seconds`."""
    deadline = time.monotonic() + seconds
    while any(_still_trains(each, epoch) for each in stage_dirs):
        if time.monotonic() > deadline:
            return False
        time.sleep(_POLL_SECONDS)
    return True


def _still_trains(stage_dir: Path, epoch: int) -> bool:
    attempt_dir = _running(stage_dir, epoch)
    return attempt_dir is not None and (attempt_dir / _metrics.FILE_NAME).exists()


def _running(stage_dir: Path, epoch: int) -> Path | None:
    """Folder of the attempt that trains now."""
    latest = outcomes(stage_dir)[-1:]
    if not latest or latest[0].ended is not None or latest[0].epoch != epoch:
        return None
    return stage_dir / "attempts" / f"{latest[0].attempt:03d}"
