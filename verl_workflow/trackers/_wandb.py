"""Metrics to Weights & Biases."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from verl_workflow.trackers._facts import Facts
from verl_workflow.trackers._sink import Point


class WandbSink:
    """A run with an id of its own making, resumed by whoever comes with it."""

    def __init__(self, tracker: Mapping[str, Any], facts: Facts, folder: Path) -> None:
        import wandb

        folder.mkdir(parents=True, exist_ok=True)
        self._offline = tracker["mode"] == "offline"
        self._run = wandb.init(
            project=str(tracker["project"]),
            entity=tracker.get("entity"),
            id=facts.identity,
            name=facts.name,
            dir=str(folder),
            mode="offline" if self._offline else "online",
            resume="allow",
            config={**facts.settings, **{f"verl_workflow.{key}": value for key, value in facts.tags.items()}},
            settings=wandb.Settings(silent=True, console="off"),
        )

    def last_step(self) -> int | None:
        # Offline nothing is known of what was written before.
        return None if self._offline else max(0, int(self._run.step) - 1)

    def send(self, points: Sequence[Point]) -> None:
        for point in points:
            self._run.log(dict(point.numbers), step=point.step, commit=True)

    def close(self) -> None:
        import wandb

        self._run.finish()
        # Only then its service has written everything; it would end with this process.
        wandb.teardown()
