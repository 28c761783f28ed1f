"""Progress of a training, from its metrics file: what to show, and when to call it stuck."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from verl_workflow.training._metrics import REWARD, STEP_SECONDS, MetricsFile, Row, non_finite, step_seconds


@dataclass(kw_only=True)
class Watch:
    """Reads the metrics of one attempt as they come.

    Attributes:
        file: what verl writes.
        total: planned steps. start: the step resumed from, 0 for none.
        first_step_seconds: how long the start and the first step may take.
        factor, minimum_seconds: later steps may take `factor` times the median step, at least `minimum_seconds`
            (saving and validation happen between steps).
        patience: steps in a row whose numbers may be lost before the training counts as dead.
    """

    file: MetricsFile
    total: int
    start: int = 0
    first_step_seconds: float = 3600.0
    factor: float = 20.0
    minimum_seconds: float = 900.0
    patience: int = 5
    began: float = field(default_factory=time.monotonic)
    _rows: list[Row] = field(default_factory=list, init=False)
    _moved: float | None = field(default=None, init=False)

    @property
    def step(self) -> int:
        return self._rows[-1].step if self._rows else self.start

    def look(self, now: float) -> Mapping[str, Any] | None:
        """Progress when there is news, else None."""
        new = [row for row in self.file.read() if row.trained]
        if not new:
            return None
        self._rows += new
        self._moved = now
        latest = self._rows[-1]
        # The first step of a process also pays for its start: what it took says nothing of the others.
        pace = step_seconds(self._rows[1:])
        return {
            "phase": "training",
            "step": latest.step,
            "total": self.total,
            "reward": latest.number(REWARD),
            "step_seconds": latest.number(STEP_SECONDS),
            "eta_seconds": None if pace is None else pace * (self.total - latest.step),
        }

    def dead(self) -> str | None:
        """Which losses or gradients were not finite in each of the last `patience` steps, or None."""
        recent = self._rows[-self.patience :]
        bad = set.intersection(*(set(non_finite(row)) for row in recent)) if len(recent) == self.patience else set()
        return f"{', '.join(sorted(bad))} was not finite for {self.patience} steps up to {self.step}" if bad else None

    def stalled(self, now: float) -> str | None:
        """Why the training counts as stuck, or None."""
        if self._moved is None:
            if now - self.began > self.first_step_seconds:
                return f"no step was finished within {self.first_step_seconds:.0f} s of the start"
            return None
        limit = max(self.minimum_seconds, self.factor * (step_seconds(self._rows) or 0.0))
        if now - self._moved > limit:
            return f"no step was finished for {limit:.0f} s after step {self.step}"
        return None
