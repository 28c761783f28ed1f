"""A static graph of named steps: what a driver executes."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from graphlib import CycleError, TopologicalSorter
from typing import Any

from verl_workflow.errors import ErrorCode, UserError, VerlWorkflowError
from verl_workflow.storage import Store

_REPORT_EVERY_S = 1.0


@dataclass(frozen=True, kw_only=True)
class RetryPolicy:
    """Attributes: attempts in all for each driver that takes the run; backoff_s before the second, doubled each time."""

    attempts: int = 3
    backoff_s: float = 2.0

    def wait_s(self, attempt: int) -> float:
        """Seconds to wait after the attempt of that ordinal (from 1) has failed; a minute at most."""
        return float(min(60.0, self.backoff_s * 2 ** (attempt - 1)))


@dataclass(kw_only=True)
class StepContext:
    """Handed to a step: who it is and the values of the steps it comes after.

    Attributes:
        attempt: 1, 2, ... over the whole run, never used twice.
        epoch: of the driver that started it.
    """

    run_id: str
    step: str
    attempt: int
    epoch: int
    inputs: Mapping[str, Any]
    store: Store
    _reported: float = field(default=float("-inf"), repr=False)
    _phase: Any = field(default=None, repr=False)

    def report(self, facts: Mapping[str, Any]) -> None:
        """Show progress: small JSON. At most one a second is written, a change of `phase` at once; losing one is no error."""
        now = time.monotonic()
        if now - self._reported < _REPORT_EVERY_S and facts.get("phase") == self._phase:
            return
        self._reported, self._phase = now, facts.get("phase")
        body = {**facts, "attempt": self.attempt, "time": time.time()}
        try:
            self.store.put(f"runs/{self.run_id}/progress/{self.step}.json", json.dumps(body).encode())
        except VerlWorkflowError:
            # Progress is for the eye: a full disk or a lost network shows where it matters, at the commit.
            return


@dataclass(frozen=True, kw_only=True)
class Step:
    """One node.

    Attributes:
        call: picklable; given a `StepContext`, returns JSON. May run more than once; is committed once.
        after: names of steps whose values it is given.
        timeout_s: from start to end of an attempt; None is no limit.
        num_cpus, num_gpus: logical resources held while it runs.
        key: given the inputs, the identity of the result over runs; None means that results are never re-used.
        verify: given a stored result, raises VerlWorkflowError unless it can still be used.
    """

    name: str
    call: Callable[[StepContext], Any]
    after: tuple[str, ...] = ()
    retry: RetryPolicy = RetryPolicy()
    timeout_s: float | None = None
    num_cpus: float = 0.0
    num_gpus: float = 0.0
    key: Callable[[Mapping[str, Any]], str] | None = None
    verify: Callable[[Any], None] | None = None


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Steps with unique names whose edges form no cycle. Raises UserError(SPEC_INVALID) otherwise."""

    steps: tuple[Step, ...]

    def __post_init__(self) -> None:
        names = [step.name for step in self.steps]
        for name in names:
            if names.count(name) > 1:
                raise UserError(ErrorCode.SPEC_INVALID, "two steps have one name", value=name, remedy="Rename one.")
        for step in self.steps:
            for name in step.after:
                if name not in names:
                    raise UserError(
                        ErrorCode.SPEC_INVALID,
                        "a step comes after one that is not in the plan",
                        where=step.name,
                        value=name,
                        remedy=f"The plan has {', '.join(names)}.",
                    )
        try:
            self._order()
        except CycleError as error:
            raise UserError(
                ErrorCode.SPEC_INVALID,
                f"the steps wait for each other: {' -> '.join(error.args[1])}",
                remedy="Take one of these edges out.",
            ) from error

    def in_order(self) -> Iterator[Step]:
        """All steps, each after those it depends on, otherwise as they were given."""
        steps = {step.name: step for step in self.steps}
        return (steps[name] for name in self._order())

    def _order(self) -> list[str]:
        return list(TopologicalSorter({step.name: step.after for step in self.steps}).static_order())
