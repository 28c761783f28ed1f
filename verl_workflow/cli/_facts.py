"""A run's state as the command line tells it: plain figures, the same for tables, lines and JSON."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from verl_workflow.errors import ErrorCode, VerlWorkflowError
from verl_workflow.stored_json import is_number

if TYPE_CHECKING:
    from verl_workflow.outline import Outline
    from verl_workflow.workflow import Attempt, RunState, StepState

# What a run's state calls a step that has no stage in the pipeline: the model all stages start from.
MODEL = "model"


@dataclass(frozen=True, kw_only=True)
class AttemptFacts:
    """One try at a stage.

    Times are Unix seconds; `outcome` is how it ended, in words, empty while it goes on; `error` is the first line of
    what it failed by.
    """

    number: int
    started_at: float
    ended_at: float | None = None
    outcome: str = ""
    error: str = ""


@dataclass(frozen=True, kw_only=True)
class StageFacts:
    """One stage.

    Attributes:
        kind: as in the pipeline, or ``model``.
        values: the combination of a matrix that a member stands for.
        status: ``waiting``, ``running``, ``retrying``, ``interrupted``, ``succeeded``, ``failed``, ``tolerated``
            (failed, and the run goes on without it) or ``cancelled``.
        attempt: number of the latest try, 0 before the first.
        done, total, unit: progress counted in `unit`, ``step`` or ``row``.
        warning: what a guard of a training has said last.
        step_seconds: of the latest step. eta, elapsed: in seconds.
        reused_from: id of the run whose result stands in.
        error: see `VerlWorkflowError.to_json`.
    """

    name: str
    kind: str
    status: str
    values: Mapping[str, Any] = field(default_factory=dict)
    attempt: int = 0
    phase: str = ""
    warning: str = ""
    done: int | None = None
    total: int | None = None
    unit: str = "step"
    reward: float | None = None
    step_seconds: float | None = None
    eta: float | None = None
    elapsed: float | None = None
    reused_from: str | None = None
    error: Mapping[str, Any] | None = None
    value: Any = None
    attempts: tuple[AttemptFacts, ...] = ()

    @property
    def ended(self) -> bool:
        return self.status in {"succeeded", "failed", "tolerated", "cancelled"}

    def to_json(self) -> dict[str, Any]:
        return {
            "stage": self.name,
            "kind": self.kind,
            "values": dict(self.values),
            "status": self.status,
            "attempt": self.attempt,
            "progress": {
                "phase": self.phase,
                "warning": self.warning,
                "done": self.done,
                "total": self.total,
                "unit": self.unit,
                "reward": self.reward,
                "step_seconds": self.step_seconds,
                "eta_seconds": self.eta,
            },
            "elapsed_seconds": self.elapsed,
            "reused_from": self.reused_from,
            "error": self.error,
            "value": self.value,
        }


@dataclass(frozen=True, kw_only=True)
class RunFacts:
    """A run.

    Attributes:
        status: ``pending``, ``running``, ``resumable``, ``succeeded``, ``failed``, ``cancelled`` or ``damaged``.
        storage: URI. artifacts: folder of the bulk data, empty when it is not known. source: the pipeline's file, empty
            when it is not known.
        elapsed: seconds from the first start to the end, or to the last sign of life.
        heartbeat_age: seconds since the driver's last sign of life, None when there was none.
        epoch: how many drivers have taken the run.
    """

    run_id: str
    pipeline: str
    status: str
    storage: str
    artifacts: str
    stages: tuple[StageFacts, ...]
    source: str = ""
    epoch: int = 0
    owner: Mapping[str, Any] | None = None
    started_at: float | None = None
    ended_at: float | None = None
    elapsed: float | None = None
    heartbeat_age: float | None = None
    cancel_requested: bool = False
    error: Mapping[str, Any] | None = None

    @property
    def ended(self) -> bool:
        return self.status in {"succeeded", "failed", "cancelled"}

    @property
    def resumable(self) -> bool:
        return self.status in {"pending", "resumable", "failed"}

    def to_json(self, *, brief: bool = False) -> dict[str, Any]:
        """Everything as JSON; with `brief`, stages by their status only."""
        return {
            "run_id": self.run_id,
            "pipeline": self.pipeline,
            "status": self.status,
            "storage": self.storage,
            "artifacts": self.artifacts,
            "started_at": self.started_at,
            "ended_at": self.ended_at,
            "elapsed_seconds": self.elapsed,
            "error": self.error,
            "stages": {stage.name: stage.status for stage in self.stages}
            if brief
            else [stage.to_json() for stage in self.stages],
            **({} if brief else self._driver_json()),
        }

    def _driver_json(self) -> dict[str, Any]:
        return {
            "driver": {"owner": self.owner, "epoch": self.epoch, "heartbeat_age_seconds": self.heartbeat_age},
            "cancel_requested": self.cancel_requested,
        }


def facts_of(state: RunState, storage: str, *, values: bool = False, now: float | None = None) -> RunFacts:
    """What to tell about a run.

    Args:
        values: read what the stages returned, too; costs a read each.
        now: Unix time, by default the present.

    Raises:
        VerlWorkflowError(JOURNAL_DAMAGED): the definition is none of a pipeline; or, only with `values`, a value is
            not what was recorded.
    """
    from verl_workflow.outline import outline_of

    now = time.time() if now is None else now
    status = state.status.value
    alive = status == "running"
    outline = outline_of(state)
    stages = [
        _stage(name, kind, state.steps[name], state.steps[name].value if values else None, alive, now)
        if name in state.steps
        else StageFacts(name=name, kind=kind, status="cancelled" if status == "cancelled" else "waiting")
        for name, kind in _names(state, outline)
    ]
    members = {stage.name: stage.values for stage in outline.stages}
    stages = [replace(stage, values=members.get(stage.name, {})) for stage in stages]
    last = state.ended_at or (now if alive else state.updated_at)
    return RunFacts(
        run_id=state.run_id,
        pipeline=outline.pipeline,
        status=status,
        storage=storage,
        artifacts=outline.artifacts,
        stages=tuple(stages),
        source=source if isinstance(source := state.definition.get("source"), str) else "",
        epoch=state.epoch,
        owner=state.owner,
        started_at=state.created_at,
        ended_at=state.ended_at,
        elapsed=None if state.created_at is None or last is None else max(0.0, last - state.created_at),
        heartbeat_age=state.heartbeat_age_s,
        cancel_requested=state.cancel_requested,
        error=state.error,
    )


def damaged_facts(state: RunState, storage: str, error: Mapping[str, Any]) -> RunFacts:
    """What is left to tell about a run whose record cannot be read. `error` says why: `VerlWorkflowError.to_json`."""
    return RunFacts(
        run_id=state.run_id,
        pipeline="",
        status="damaged",
        storage=storage,
        artifacts="",
        stages=(),
        started_at=state.created_at,
        error=error,
    )


def listed_facts(state: RunState, storage: str) -> RunFacts:
    """As `facts_of`; a run whose record cannot be read has the status ``damaged``, and the reason in `error`."""
    if state.status.value == "damaged":
        return damaged_facts(state, storage, state.error or {})
    try:
        return facts_of(state, storage)
    except VerlWorkflowError as error:
        if error.code is not ErrorCode.JOURNAL_DAMAGED:
            raise
        return damaged_facts(state, storage, error.to_json())


def _names(state: RunState, outline: Outline) -> Iterator[tuple[str, str]]:
    """Stages in the pipeline's order; before them steps that are no stages."""
    kinds = {stage.name: stage.kind for stage in outline.stages}
    yield from ((name, MODEL if name == MODEL else "python") for name in state.steps if name not in kinds)
    yield from kinds.items()


def _stage(name: str, kind: str, step: StepState, value: Any, alive: bool, now: float) -> StageFacts:
    status = step.status.value
    latest = step.attempts[-1] if step.attempts else None
    if status == "running" and not alive:
        status = "interrupted"
    elif status == "waiting" and latest is not None:
        status = "retrying" if alive else "interrupted"
    error: Mapping[str, Any] | None = latest.error if latest is not None and status != "succeeded" else None
    tolerated = (step.progress or {}).get("tolerated")
    if status == "succeeded" and isinstance(tolerated, Mapping):
        status, error, value = "tolerated", tolerated, None
    return StageFacts(
        name=name,
        kind=kind,
        status=status,
        attempt=latest.number if latest is not None else 0,
        elapsed=_elapsed(latest, alive, now),
        reused_from=step.reused_from,
        error=error,
        value=value,
        attempts=tuple(
            AttemptFacts(
                number=attempt.number,
                started_at=attempt.started_at,
                ended_at=attempt.ended_at,
                outcome=_outcome(attempt, step, last=attempt is latest, alive=alive),
                error=next(iter(str((attempt.error or {}).get("message", "")).splitlines()), ""),
            )
            for attempt in step.attempts
        ),
        **_progress(step.progress or {}, status, value),
    )


def _elapsed(attempt: Attempt | None, alive: bool, now: float) -> float | None:
    if attempt is None:
        return None
    end = attempt.ended_at if attempt.ended_at is not None else now if alive else None
    return None if end is None else max(0.0, end - attempt.started_at)


def _outcome(attempt: Attempt, step: StepState, *, last: bool, alive: bool) -> str:
    status = attempt.status.value
    if status == "succeeded":
        return f"re-used from {step.reused_from}" if step.reused_from else "succeeded"
    if attempt.error is not None:
        return f"failed: {attempt.error.get('traceback') or attempt.error.get('message', '')}".rstrip()
    if status == "running":
        # Nobody will write how the attempt of a driver that has died ended.
        return "" if last and alive else "interrupted"
    return "interrupted" if status == "failed" else status


def _progress(facts: Mapping[str, Any], status: str, value: Any) -> dict[str, Any]:
    """What a stage has reported, whatever its kind calls it."""
    found: dict[str, Any] = {
        name: told if isinstance(told := facts.get(name), str) else "" for name in ("phase", "warning")
    }
    if "step" in facts:
        found |= {"done": _number(facts, "step"), "total": _number(facts, "total")}
    elif "rows_done" in facts:
        found |= {"done": _number(facts, "rows_done"), "total": _number(facts, "rows"), "unit": "row"}
    elif "rows" in facts:
        found |= {"done": _number(facts, "rows"), "unit": "row"}
    found |= {"reward": _number(facts, "reward"), "step_seconds": _number(facts, "step_seconds")}
    if status == "running":
        found["eta"] = _number(facts, "eta_seconds")
    if found["reward"] is None and isinstance(value, Mapping) and isinstance(value.get("reward"), Mapping):
        found["reward"] = _number(value["reward"], "last")
    return found


def _number(facts: Mapping[str, Any], name: str) -> int | float | None:
    """What a stage reports is a hint that any code may have written: what is no number is no news."""
    value = facts.get(name)
    return value if is_number(value) else None
