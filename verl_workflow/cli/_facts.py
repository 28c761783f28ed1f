"""A run's state as the command line tells it: plain figures, the same for tables, lines and JSON."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from verl_workflow.workflow import RunState, StepState


@dataclass(frozen=True, kw_only=True)
class AttemptFacts:
    """One try at a stage. `outcome` is how it ended, in words; times are seconds since the epoch."""

    number: int
    started_at: float | None
    ended: bool = False
    outcome: str = ""


@dataclass(frozen=True, kw_only=True)
class StageFacts:
    """One stage.

    Attributes:
        kind: as in the pipeline, or ``model``.
        status: ``pending``, ``running``, ``retrying``, ``succeeded``, ``failed`` or ``cancelled``.
        attempt: of the run's latest try, 0 before the first.
        done, total, unit: progress counted in `unit`, ``step`` or ``row``.
        step_seconds: of the latest step. eta, elapsed: in seconds.
        reused_from: id of the run whose result stands in.
    """

    name: str
    kind: str
    status: str
    attempt: int = 0
    phase: str = ""
    done: int | None = None
    total: int | None = None
    unit: str = "step"
    reward: float | None = None
    step_seconds: float | None = None
    eta: float | None = None
    elapsed: float | None = None
    reused_from: str | None = None
    error: str | None = None
    value: Any = None
    attempts: tuple[AttemptFacts, ...] = ()

    @property
    def ended(self) -> bool:
        return self.status in {"succeeded", "failed", "cancelled"}


@dataclass(frozen=True, kw_only=True)
class RunFacts:
    """A run.

    Attributes:
        storage: URI. artifacts: folder of the bulk data, empty when it is not known.
        heartbeat_age: seconds since the driver's last sign of life, None when there was none.
        abandoned: not ended, and no driver shows signs of life: waits to be resumed.
    """

    run_id: str
    pipeline: str
    status: str
    storage: str
    artifacts: str
    stages: tuple[StageFacts, ...]
    started_at: float | None = None
    ended_at: float | None = None
    elapsed: float | None = None
    heartbeat_age: float | None = None
    abandoned: bool = False
    error: str | None = None
    owner: Mapping[str, Any] | None = field(default=None)

    @property
    def ended(self) -> bool:
        return self.status in {"succeeded", "failed", "cancelled"}
