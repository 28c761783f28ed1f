"""What verl's file logger tells while it trains."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

FILE_NAME = "verl_metrics.jsonl"
REWARD = "critic/score/mean"
STEP_SECONDS = "timing_s/step"
# verl's logger writes NaN and infinity as null; any of these being null means that the numbers have gone.
_HEALTH = (REWARD, "actor/grad_norm", "actor/pg_loss", "actor/loss", "critic/grad_norm", "critic/vf_loss")


@dataclass(frozen=True, kw_only=True)
class Row:
    """The metrics of one step (step 0 holds those of a validation before training)."""

    step: int
    data: Mapping[str, Any]

    @property
    def trained(self) -> bool:
        """Whether a training step, and not only a validation, is behind the row."""
        return self.step > 0 and STEP_SECONDS in self.data

    def number(self, key: str) -> float | None:
        value = self.data.get(key)
        return float(value) if isinstance(value, (int, float)) else None


@dataclass
class MetricsFile:
    """A file that verl is appending to, read piece by piece.

    A last line without its line break is left for the next read; a line that is no JSON is passed over, since a killed
    writer leaves one.
    """

    path: Path
    _offset: int = field(default=0, init=False)

    def read(self) -> list[Row]:
        """Rows added since the last call."""
        try:
            with self.path.open("rb") as stream:
                stream.seek(self._offset)
                block = stream.read()
        except FileNotFoundError:
            return []
        whole = block[: block.rfind(b"\n") + 1]
        self._offset += len(whole)
        return [row for line in whole.splitlines() if (row := _row(line)) is not None]


def attempt_rows(stage_dir: Path) -> list[list[Row]]:
    """What each attempt of a verl stage has logged up to now, in order.

    Args:
        stage_dir: ``<artifacts>/runs/<run>/stages/<stage>``.
    """
    return [MetricsFile(path).read() for path in sorted(stage_dir.glob(f"attempts/*/{FILE_NAME}"))]


def merge(paths: Iterable[Path]) -> list[Row]:
    """Rows of all attempts by step; where attempts overlap, the later one (later in `paths`) is what counts."""
    steps: dict[int, dict[str, Any]] = {}
    for path in paths:
        attempt: dict[int, dict[str, Any]] = {}
        for row in MetricsFile(path).read():
            attempt.setdefault(row.step, {}).update(row.data)
        steps |= attempt
    return [Row(step=step, data=steps[step]) for step in sorted(steps)]


def write(rows: Iterable[Row], path: Path) -> None:
    """One JSON object a line, ``{"step": n, "data": {...}}``, as verl writes them."""
    partial = path.with_name(f"{path.name}.partial")
    partial.write_text(
        "".join(json.dumps({"step": row.step, "data": row.data}) + "\n" for row in rows), encoding="utf-8"
    )
    partial.replace(path)


def non_finite(row: Row) -> list[str]:
    """Names of what is NaN or infinite in the row: the mean reward, losses and gradient norms."""
    return [key for key in _HEALTH if key in row.data and row.data[key] is None]


def step_seconds(rows: Iterable[Row]) -> float | None:
    """Median duration of the training steps, None before the first."""
    times = [seconds for row in rows if (seconds := row.number(STEP_SECONDS)) is not None]
    return statistics.median(times) if times else None


def rewards(rows: Iterable[Row]) -> dict[str, float | None]:
    """First, last and best mean reward of the training steps."""
    found = list(_rewards(rows))
    if not found:
        return {"first": None, "last": None, "best": None}
    return {"first": found[0], "last": found[-1], "best": max(found)}


def _rewards(rows: Iterable[Row]) -> Iterator[float]:
    for row in rows:
        if (reward := row.number(REWARD)) is not None:
            yield reward


def _row(line: bytes) -> Row | None:
    try:
        record = json.loads(line)
        return Row(step=int(record["step"]), data=dict(record["data"]))
    except (ValueError, KeyError, TypeError):
        return None
