"""What each attempt at a stage came to, kept beside its log: retries are decided by it, and `explain` tells it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from verl_workflow.training.failures import Failure

_FILE = "outcome.json"


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """One attempt at a verl stage.

    Attributes:
        attempt: its number, 1, 2, ... epoch: of the driver that started it.
        began, ended: Unix time in seconds; `ended` is None while it runs, and for ever when its process was lost.
        gpus: accelerators it held; 0 on the CPU. trained_s: seconds for which verl's process ran.
        start, reached, saved: the step it resumed from (0 for none), the last one trained, and that of the newest
            whole checkpoint.
        changes: verl's settings that earlier failures made this attempt run with: dotted key -> value.
        failure: None when it succeeded or has not ended.
    """

    attempt: int
    epoch: int
    began: float
    ended: float | None = None
    gpus: int = 0
    trained_s: float = 0.0
    start: int = 0
    reached: int = 0
    saved: int = 0
    changes: Mapping[str, Any] = field(default_factory=dict)
    failure: Failure | None = None

    def to_json(self) -> dict[str, Any]:
        """Plain JSON; `from_json` reads it."""
        kept = {name: getattr(self, name) for name in self.__dataclass_fields__ if name != "failure"}
        return {
            **kept,
            "changes": dict(self.changes),
            "failure": None if self.failure is None else self.failure.to_json(),
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Outcome:
        """The outcome behind what `to_json` gave; ValueError, KeyError or TypeError when it is none."""
        failure = data["failure"]
        return replace(
            cls(**{**data, "failure": None}), failure=None if failure is None else Failure.from_json(failure)
        )


def record(attempt_dir: Path, outcome: Outcome) -> None:
    """Keep the outcome in the attempt's folder, atomically; a later call replaces it."""
    partial = attempt_dir / f"{_FILE}.partial"
    partial.write_text(json.dumps(outcome.to_json(), indent=1), encoding="utf-8")
    partial.replace(attempt_dir / _FILE)


def outcomes(stage_dir: Path) -> list[Outcome]:
    """Outcomes of all attempts at the stage that have one, in order; what cannot be read is passed over.

    Args:
        stage_dir: ``<artifacts>/runs/<run>/stages/<stage>``.
    """
    found = []
    for path in sorted(stage_dir.glob(f"attempts/*/{_FILE}")):
        try:
            found.append(Outcome.from_json(json.loads(path.read_text(encoding="utf-8"))))
        except (OSError, ValueError, KeyError, TypeError):
            continue
    return sorted(found, key=lambda outcome: outcome.attempt)


def last_failure(stage_dir: Path) -> Failure | None:
    """What the latest attempt at the stage failed of; None when it did not, or nothing is known of it."""
    found = outcomes(stage_dir)
    return found[-1].failure if found else None
