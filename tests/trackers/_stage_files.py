"""What a training writes, as trackers meet it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from verl_workflow.trackers import Facts
from verl_workflow.trackers._facts import keep


def rows(stage_dir: Path, attempt: int, steps: list[int], **data: Any) -> None:
    """Add rows to an attempt's metrics: ``reward`` is ten times the attempt plus a hundredth of the step."""
    folder = stage_dir / f"attempts/{attempt:03d}"
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "verl_metrics.jsonl").open("a", encoding="utf-8") as file:
        for step in steps:
            numbers = {"critic/score/mean": 10 * attempt + step / 100, "timing_s/step": 1.0, "none": None, **data}
            file.write(json.dumps({"step": step, "data": numbers}) + "\n")


def facts(stage_dir: Path, *trackers: dict[str, Any], run_id: str = "night-1") -> Facts:
    """Kept in the stage's folder, too."""
    found = Facts(
        run_id=run_id,
        stage="train",
        records=f"runs/{run_id}/0123",
        trackers=list(trackers),
        settings={"actor_rollout_ref.actor.optim.lr": 1e-6},
        tags={"model": "ab12"},
    )
    keep(stage_dir, found)
    return found
