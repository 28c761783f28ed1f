"""Time limits of running attempts."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import dataclass

from verl_workflow.errors import ErrorCode, VerlWorkflowError
from verl_workflow.storage import Store
from verl_workflow.workflow._attempt import Outcome
from verl_workflow.workflow._names import RunKey
from verl_workflow.workflow._plan import Step
from verl_workflow.workflow._progress import beats_each, read_progress

# How often an attempt is asked whether it has begun, and for its sign of life.
_LOOK_S = 0.5


@dataclass(kw_only=True)
class _Watched:
    step: Step
    attempt: int
    # By the driver's monotonic clock; infinite where no limit runs.
    end: float
    look: float
    begun: bool = False
    # Of the last sign of life: the machine's own time, and when the driver saw it.
    beat: float = 0.0
    beat_seen: float = math.inf


class Deadlines:
    """The attempts of a run that have a limit. Only what the driver's own monotonic clock says counts."""

    def __init__(self, store: Store, run: RunKey) -> None:
        self._store = store
        self._run = run
        self._watched: dict[Future[Outcome], _Watched] = {}

    def watch(self, future: Future[Outcome], step: Step, attempt: int) -> None:
        now = time.monotonic()
        looks = step.start_to_close_s is not None or step.heartbeat_s is not None
        if step.timeout_s is None and not looks:
            return
        end = math.inf if step.timeout_s is None else now + step.timeout_s
        look = now + beats_each(step.heartbeat_s, _LOOK_S) if looks else math.inf
        self._watched[future] = _Watched(step=step, attempt=attempt, end=end, look=look)

    def forget(self, future: Future[Outcome]) -> None:
        self._watched.pop(future, None)

    def times(self) -> Iterator[float]:
        """When, by the monotonic clock, to ask next."""
        for watched in self._watched.values():
            yield min(watched.end, watched.look)

    def passed(self) -> list[tuple[Future[Outcome], VerlWorkflowError]]:
        """Attempts whose limit has passed, each once, and what to say of it."""
        late = []
        for future, watched in list(self._watched.items()):
            error = self._judge(watched, time.monotonic())
            if error is not None:
                late.append((future, error))
                del self._watched[future]
        return late

    def _judge(self, watched: _Watched, now: float) -> VerlWorkflowError | None:
        step = watched.step
        if now >= watched.look:
            self._look(watched, now)
        if now >= watched.end:
            limit = step.start_to_close_s if watched.begun and step.start_to_close_s is not None else step.timeout_s
            what = f"the attempt took longer than {limit:g} s and was stopped"
            return _timeout(step, what, "Raise the step's timeout, or find out what it waits for.")
        if step.heartbeat_s is not None and now - watched.beat_seen > step.heartbeat_s:
            what = f"the attempt gave no sign of life for {step.heartbeat_s:g} s and was stopped"
            return _timeout(step, what, "Call heartbeat() more often, or raise the step's heartbeat_timeout_s.")
        return None

    def _look(self, watched: _Watched, now: float) -> None:
        watched.look = now + beats_each(watched.step.heartbeat_s, _LOOK_S)
        found = read_progress(self._store, self._run, watched.step.name)
        if found is None or found.attempt != watched.attempt:
            return
        if not watched.begun:
            watched.begun = True
            if watched.step.start_to_close_s is not None:
                watched.end = min(watched.end, now + watched.step.start_to_close_s)
        if found.time != watched.beat:
            watched.beat, watched.beat_seen = found.time, now
        if watched.step.heartbeat_s is None:
            watched.look = math.inf


def _timeout(step: Step, what: str, remedy: str) -> VerlWorkflowError:
    return VerlWorkflowError(ErrorCode.STEP_TIMEOUT, what, where=step.name, remedy=remedy, retryable=True)
