"""A tracker as the sender sees it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from verl_workflow.trackers._facts import Facts


@dataclass(frozen=True, kw_only=True)
class Point:
    """The numbers of one step."""

    step: int
    numbers: Mapping[str, float]


class Sink(Protocol):
    """An open run of a tracker. Each method may raise whatever its client raises, and take as long."""

    def last_step(self) -> int | None:
        """The last step that the tracker holds; None when it cannot tell."""

    def send(self, points: Sequence[Point]) -> None:
        """Hand the points over; on return the tracker has them."""

    def close(self) -> None:
        """Leave the run open for a later sender."""


def open_sink(tracker: Mapping[str, Any], facts: Facts, folder: Path) -> Sink:
    """Open the stage's run in a tracker, or make it there; params and tags are sent when it is made.

    Args:
        tracker: as it is written in the pipeline. folder: for what the client writes by itself.
    """
    if tracker["kind"] == "mlflow":
        from verl_workflow.trackers._mlflow import MlflowSink

        return MlflowSink(tracker, facts)
    if tracker["kind"] == "wandb":
        from verl_workflow.trackers._wandb import WandbSink

        return WandbSink(tracker, facts, folder)
    assert tracker["kind"] == "tensorboard", tracker
    from verl_workflow.trackers._tensorboard import TensorboardSink

    return TensorboardSink(tracker, facts, folder)


def finite(data: Mapping[str, Any]) -> dict[str, float]:
    """What of a row is a number."""
    return {
        key: float(value)
        for key, value in data.items()
        if isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
    }
