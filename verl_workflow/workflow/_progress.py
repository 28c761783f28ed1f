"""What running steps last reported: for the eye, for time limits, and for attempts that go on from there."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from verl_workflow.storage import Store
from verl_workflow.stored_json import is_number, parse_json
from verl_workflow.workflow._names import RunKey, path_part


@dataclass(frozen=True, kw_only=True)
class Progress:
    """Attributes: time: seconds since 1970, of the reporting machine. facts: as given; see `StepContext.report`."""

    attempt: int
    time: float
    facts: Mapping[str, Any]


def progress_key(run: RunKey, step: str) -> str:
    return f"{run.folder}/progress/{path_part(step)}.json"


def read_progress(store: Store, run: RunKey, step: str) -> Progress | None:
    """The last report on a step, of whatever attempt; None when there is none that can be read."""
    data = store.get(progress_key(run, step))
    try:
        found = parse_json(data) if data is not None else None
    except ValueError:
        return None
    if not isinstance(found, dict) or not isinstance(found.get("facts"), dict):
        return None
    attempt, at = found.get("attempt"), found.get("time", 0.0)
    if not isinstance(attempt, int) or not is_number(at):
        return None
    before = found.get("before")
    facts = found["facts"] or (before if isinstance(before, dict) else {})
    return Progress(attempt=attempt, time=float(at), facts=facts)


def beats_each(limit_s: float | None, usual_s: float) -> float:
    """How far apart two signs of life, or two looks for one, may be where none is to be missed for `limit_s`."""
    return usual_s if limit_s is None else min(usual_s, limit_s / 4)
