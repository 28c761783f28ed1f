"""What is known of a stage's attempts, from the run's journal and the files beside their logs, as plain JSON."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from verl_workflow.cli._facts import MODEL, AttemptFacts, RunFacts, StageFacts

if TYPE_CHECKING:
    from verl_workflow.training._history import Outcome


def account_of(facts: RunFacts, stage: StageFacts, *, now: float | None = None) -> dict[str, Any]:
    """A stage's attempts, error and cost.

    Returns:
        ``stage``, ``kind``, ``status``, ``progress`` (of a stage that runs), ``attempts``, ``error``, ``spent`` (None
        unless something is known), ``told`` (whether the last attempt's own record says why it failed), and ``missing``
        (a folder that should be there and is not, or None).

    Args:
        now: Unix time, by default the present.
    """
    now = time.time() if now is None else now
    folder = Path(facts.artifacts) / "runs" / facts.run_id / "stages" / stage.name if facts.artifacts else None
    known = _known(folder) if folder is not None and stage.kind == "verl" else {}
    attempts = [_attempt(attempt, known.get(attempt.number), now) for attempt in stage.attempts]
    last = attempts[-1] if attempts else None
    return {
        "stage": stage.name,
        "kind": stage.kind,
        "status": stage.status,
        "progress": stage.to_json()["progress"] if stage.status == "running" else None,
        "attempts": attempts,
        "error": stage.error,
        "spent": _spent(list(known.values()), running=stage.status == "running"),
        "told": last is not None and last.get("failure") is not None and _same(last),
        "missing": _missing(folder, stage),
    }


def _missing(folder: Path | None, stage: StageFacts) -> str | None:
    """The model that all stages start from is kept elsewhere, for other runs, too."""
    gone = folder is not None and stage.kind != MODEL and stage.attempts and not folder.is_dir()
    return str(folder) if gone else None


def total(accounts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """What all stages have cost."""
    costs = [account["spent"] for account in accounts if account["spent"] is not None]
    return {
        "used_hours": sum(cost["used_hours"] for cost in costs),
        "wasted_hours": sum(cost["wasted_hours"] for cost in costs),
        "gpus": max((cost["gpus"] for cost in costs), default=0),
    }


def _known(folder: Path) -> dict[int, Outcome]:
    from verl_workflow.training._costs import known_attempts

    return {outcome.attempt: outcome for outcome in known_attempts(folder)}


def _spent(outcomes: Sequence[Outcome], *, running: bool) -> dict[str, Any] | None:
    if not outcomes:
        return None
    from verl_workflow.training._costs import spent

    cost = spent(outcomes, running=running)
    return {"used_hours": cost.used, "wasted_hours": cost.wasted, "gpus": cost.gpus}


def _attempt(attempt: AttemptFacts, outcome: Outcome | None, now: float) -> dict[str, Any]:
    runs = attempt.ended_at is None and not attempt.outcome
    end = now if runs else attempt.ended_at
    seconds = None if end is None else max(0.0, end - attempt.started_at)
    found: dict[str, Any] = {
        "attempt": attempt.number,
        "began": attempt.started_at,
        "seconds": seconds,
        "running": runs,
        "outcome": f"failed: {attempt.error}" if attempt.error else attempt.outcome,
    }
    if outcome is None:
        return found
    failure = outcome.failure
    return {
        **found,
        "ended": outcome.ended is not None,
        "start": outcome.start,
        "reached": outcome.reached,
        "saved": outcome.saved,
        "changes": dict(outcome.changes),
        "failure": None if failure is None else failure.to_json(),
        "followed": "" if failure is None else _decided(attempt.error, failure.advice),
        "seconds": seconds if outcome.ended is None else outcome.ended - outcome.began,
    }


def _same(attempt: Mapping[str, Any]) -> bool:
    """Whether the journal says of an attempt what its own record says: what came after may have failed as well."""
    return attempt["failure"]["what"] in attempt["outcome"]


def _decided(error: str, advice: str) -> str:
    """What the error that ended an attempt says of the next one: it stands between the advice and the log's end."""
    _, found, rest = error.partition(advice) if advice else ("", "", "")
    return rest.partition(" Last words of ")[0].strip() if found else ""
