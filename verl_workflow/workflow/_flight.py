"""The attempts of a run that are under way."""

from __future__ import annotations

import queue
import time
from collections.abc import Collection, Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from verl_workflow.errors import ErrorCode, VerlWorkflowError
from verl_workflow.storage import Store
from verl_workflow.workflow._attempt import Call, Continued, Outcome, Raised, Returned
from verl_workflow.workflow._launch import Launcher
from verl_workflow.workflow._names import RunKey
from verl_workflow.workflow._plan import Step
from verl_workflow.workflow._values import Value
from verl_workflow.workflow._watch import Deadlines

# Of so many that are under way, more land within a moment of each other; the writing of an entry takes as long.
_MANY = 8
_GATHER_S = 0.005


@dataclass(kw_only=True)
class Flying:
    """An attempt.

    Attributes:
        cache_key: what its value is called in all runs, if it is. stopped: why this driver has stopped it, None while
            it is wanted. dropped: its failure means nothing any more.
    """

    step: Step
    call: Call
    held: tuple[Any, ...]
    cache_key: str | None = None
    stopped: VerlWorkflowError | None = None
    dropped: bool = False

    @property
    def attempt(self) -> int:
        return self.call.attempt


class Flight:
    """Starts attempts, and stops them, when their time is over too; hands out what came of them."""

    def __init__(self, launcher: Launcher, store: Store, run: RunKey) -> None:
        self._launcher, self._store = launcher, store
        self._deadlines = Deadlines(store, run)
        self._flying: dict[Future[Outcome], Flying] = {}
        self._landed: queue.SimpleQueue[Future[Outcome]] = queue.SimpleQueue()

    def __len__(self) -> int:
        return len(self._flying)

    def steps(self) -> set[str]:
        """The steps that are under way."""
        return {attempt.step.name for attempt in self._flying.values()}

    def start(self, attempt: Flying) -> None:
        future = self._launcher.start(attempt.step, attempt.call, attempt.held)
        self._flying[future] = attempt
        self._deadlines.watch(future, attempt.step, attempt.attempt)
        future.add_done_callback(self._landed.put)

    def stop_all(self) -> None:
        for future in list(self._flying):
            self._launcher.cancel(future)

    def drop(self, steps: Collection[str], why: VerlWorkflowError) -> None:
        """Stop the attempts at these steps, whatever they come to."""
        for future, attempt in list(self._flying.items()):
            if attempt.step.name in steps and not attempt.dropped:
                attempt.stopped, attempt.dropped = why, True
                self._launcher.cancel(future)

    def drop_waits(self) -> None:
        """Stop what waits for an event or a time, for the workflow has failed: no work is lost."""
        why = VerlWorkflowError(ErrorCode.CANCELLED, "the workflow has failed meanwhile")
        self.drop({attempt.step.name for attempt in self._flying.values() if attempt.step.hosted}, why)

    def wait(self, until: float) -> None:
        """Wait for an attempt to end, for its limit, or for a point of the monotonic clock, whichever comes first."""
        pause = min([until, *self._deadlines.times()]) - time.monotonic()
        try:
            self._landed.put(self._landed.get(timeout=max(pause, 0.0)))
        except queue.Empty:
            return
        if len(self._flying) > _MANY:
            # What lands together is written together, and the next ones are started in one go.
            time.sleep(_GATHER_S)

    def landed(self) -> Iterator[tuple[Flying, Outcome]]:
        """The attempts that have ended since, and what came of them."""
        while not self._landed.empty():
            future = self._landed.get()
            attempt = self._flying.pop(future)
            self._deadlines.forget(future)
            outcome = future.result()
            if attempt.stopped is not None and not isinstance(outcome, Returned | Continued):
                outcome = Raised.of(attempt.stopped)
            if isinstance(outcome, Returned) and not self._is_there(outcome.value):
                what = "the value that the attempt has written is not there"
                outcome = Raised.of(VerlWorkflowError(ErrorCode.STORAGE, what, where=attempt.step.name), crash=True)
            yield attempt, outcome

    def _is_there(self, value: Value) -> bool:
        """A disk may have been away for a moment, or be another one there; object stores keep what they have taken."""
        return value.key is None or self._store.local_path is None or self._store.size(value.key) is not None

    def stop_late(self) -> None:
        for future, error in self._deadlines.passed():
            attempt = self._flying.get(future)
            if attempt is not None:
                attempt.stopped = error
                self._launcher.cancel(future)
