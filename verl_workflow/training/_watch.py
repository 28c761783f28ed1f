"""Progress of a training, from its metrics file: what to show, what its guards say, and when to call it stuck."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from verl_workflow.spec._supervision import Deadlines
from verl_workflow.training._guards import Alarm, GuardedRows
from verl_workflow.training._metrics import REWARD, STEP_SECONDS, MetricsFile, Row, step_seconds


@dataclass(kw_only=True)
class Watch:
    """Reads the metrics of one attempt as they come.

    Attributes:
        file: what verl writes; verl makes it when all is loaded and the first step begins.
        total: planned steps. start: the step resumed from, 0 for none.
        guarded: what looks at each row. deadlines: how long it may take to move.
        began: when the process was launched, by the clock of `time.monotonic`.
    """

    file: MetricsFile
    total: int
    start: int = 0
    guarded: GuardedRows = field(default_factory=lambda: GuardedRows(guards=()))
    deadlines: Deadlines = field(default_factory=Deadlines)
    began: float = field(default_factory=time.monotonic)
    _rows: list[Row] = field(default_factory=list, init=False)
    _loaded: float | None = field(default=None, init=False)
    _moved: float | None = field(default=None, init=False)
    _alarms: list[Alarm] = field(default_factory=list, init=False)

    @property
    def step(self) -> int:
        """The last one trained, `start` before the first."""
        return self._rows[-1].step if self._rows else self.start

    @property
    def phase(self) -> str:
        """``starting``, ``first step`` or ``training``."""
        if self._rows:
            return "training"
        return "starting" if self._loaded is None else "first step"

    def look(self, now: float) -> Mapping[str, Any] | None:
        """Progress when there is news, else None."""
        before = self.phase
        if self._loaded is None and self.file.path.exists():
            self._loaded = now
        new = [row for row in self.file.read() if row.trained]
        for row in new:
            self._rows.append(row)
            self._alarms += self.guarded.after(row)
        if new:
            self._moved = now
        return self.progress() if new or self.phase != before else None

    def progress(self) -> Mapping[str, Any]:
        """What is known of the training at this moment."""
        if not self._rows:
            return {"phase": self.phase, "step": self.start, "total": self.total}
        latest = self._rows[-1]
        # The first step of a process also pays for its start: what it took says nothing of the others.
        pace = step_seconds(self._rows[1:])
        return {
            "phase": self.phase,
            "step": latest.step,
            "total": self.total,
            "reward": latest.number(REWARD),
            "step_seconds": latest.number(STEP_SECONDS),
            "eta_seconds": None if pace is None else pace * (self.total - latest.step),
        }

    def alarms(self) -> Sequence[Alarm]:
        """What the guards have said since the last call."""
        said, self._alarms = self._alarms, []
        return said

    def stalled(self, now: float) -> str | None:
        """Why the training counts as stuck, or None."""
        limits = self.deadlines
        if self._loaded is None:
            if now - self.began > limits.start:
                return f"verl did not come to its first step within {limits.start:.0f} s of the start (deadlines.start)"
            return None
        if self._moved is None:
            if now - self._loaded > limits.first_step:
                return f"the first step was not finished within {limits.first_step:.0f} s (deadlines.first_step)"
            return None
        limit = max(limits.at_least, limits.times_median * (step_seconds(self._rows) or 0.0))
        if now - self._moved > limit:
            return (
                f"no step was finished for {limit:.0f} s after step {self.step} "
                "(deadlines.at_least, deadlines.times_median)"
            )
        return None
