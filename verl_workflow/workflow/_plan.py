"""What a run executes: named steps, what each waits for, and how often it is tried."""

from __future__ import annotations

import difflib
import hashlib
import heapq
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from verl_workflow.errors import ErrorCode, UserError
from verl_workflow.stored_json import is_number
from verl_workflow.workflow._names import RunKey
from verl_workflow.workflow._values import Codec

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
_LONGEST_PAUSE_S = 300.0


@dataclass(frozen=True, kw_only=True)
class RetryPolicy:
    """How often a step is tried before the run fails. Attempts whose driver was lost never count.

    Attributes:
        attempts: in all, at least 1; of those that end with an error.
        crashes: how many more may be lost with their process or node; -1 for any number; None: they count as attempts.
        backoff_s: seconds before the second attempt; multiplied by `factor` for each further one, up to `longest_s`.
        on: classes of errors that are tried again; None: all but those that say that trying again is of no use.
        never: classes that are not, even if `on` has them.
    """

    attempts: int = 3
    crashes: int | None = None
    backoff_s: float = 2.0
    factor: float = 2.0
    longest_s: float = _LONGEST_PAUSE_S
    on: tuple[type[BaseException], ...] | None = None
    never: tuple[type[BaseException], ...] = ()

    def __post_init__(self) -> None:
        for name in ("on", "never"):
            kinds = getattr(self, name)
            if isinstance(kinds, list):
                object.__setattr__(self, name, tuple(kinds))
            elif kinds is not None and not isinstance(kinds, tuple):
                raise TypeError(f"RetryPolicy.{name} has to be a tuple of exception classes, not {kinds!r}.")
            for kind in getattr(self, name) or ():
                if not (isinstance(kind, type) and issubclass(kind, BaseException)):
                    raise TypeError(f"RetryPolicy.{name} has to hold exception classes, not {kind!r}.")
        for name in ("backoff_s", "factor", "longest_s"):
            # The journal's JSON knows no others.
            if not is_number(getattr(self, name)):
                raise ValueError(f"RetryPolicy.{name} has to be a finite number, not {getattr(self, name)!r}.")
        for name in ("attempts", "crashes"):
            number = getattr(self, name)
            if not (isinstance(number, int) or (name == "crashes" and number is None)):
                raise ValueError(f"RetryPolicy.{name} has to be a whole number, not {number!r}.")
        if self.attempts < 1 or self.factor < 1 or self.backoff_s < 0 or self.longest_s < 0:
            raise ValueError(
                f"RetryPolicy takes one attempt or more, a factor of 1 or more, and no negative time: {self}."
            )
        if self.crashes is not None and self.crashes < -1:
            raise ValueError(f"RetryPolicy.crashes has to be -1 (any number) or more, not {self.crashes}.")

    def pause_s(self, failures: int) -> float:
        """Seconds to wait after so many failures."""
        try:
            return min(self.backoff_s * float(self.factor) ** (failures - 1), self.longest_s)
        except OverflowError:
            return self.longest_s if self.backoff_s else 0.0

    def again(self, failures: int, crashes: int, *, crash: bool) -> bool:
        """Whether another attempt follows after so many failures and crashes, the last being a crash or not."""
        if self.crashes is None:
            return failures + crashes < self.attempts
        if crash:
            return self.crashes < 0 or crashes <= self.crashes
        return failures < self.attempts

    def takes(self, error: BaseException) -> bool:
        """Whether an error of this class is tried again."""
        return not isinstance(error, self.never) and (self.on is None or isinstance(error, self.on))


@dataclass(frozen=True, kw_only=True)
class StepContext:
    """One attempt at one step, as the step's function sees it.

    Attributes:
        run: its id, and what tells it from a run that had this id before and was deleted.
        attempt: 1, 2, ... over the whole run, takeovers included; never given twice.
        epoch: of the driver that started it: side effects outside the journal carry it, so that a late writer is told.
        inputs: values of the steps in `Step.after`, by name.
        report: a sign of life, and progress for others to see, when called with small JSON facts; written at most once
            a second, best effort.
        earlier: gives what an earlier attempt reported last, None when there is nothing.
    """

    run: RunKey
    step: str
    attempt: int
    epoch: int
    inputs: Mapping[str, Any]
    report: Callable[[Mapping[str, Any]], None] = field(repr=False)
    earlier: Callable[[], Mapping[str, Any] | None] = field(default=lambda: None, repr=False)

    @property
    def run_id(self) -> str:
        """The id of the run."""
        return self.run.run_id

    @property
    def idempotency_token(self) -> str:
        """The same for all attempts at this step of this run, and another one for any other step: 64 hexadecimal
        digits to hand to services that do a thing once for a token.
        """
        return hashlib.sha256(
            f"{self.run.incarnation}:{len(self.run_id)}:{self.run_id}:{self.step}".encode()
        ).hexdigest()

    @property
    def last_heartbeat(self) -> Mapping[str, Any] | None:
        """What an earlier attempt at this step reported last, for going on from there."""
        return self.earlier()

    def heartbeat(self, **details: Any) -> None:
        """Show a sign of life, with small JSON details that the next attempt finds as `last_heartbeat`."""
        self.report(details)


@dataclass(frozen=True, kw_only=True)
class Step:
    """A named piece of work, executed at least once and committed exactly once.

    Attributes:
        name: identifies the step over restarts; 1 to 100 letters, digits, dots, dashes and underscores in a `Plan`.
        call: gets a StepContext and returns the value; crosses processes by cloudpickle. If it has a method
            ``may_retry(error)``, that says whether trying again is of use; None: as the error says itself.
        after: steps that must have succeeded before; their values are the inputs.
        timeout_s: for one attempt, from its launch, waiting for resources included; None for no limit.
        start_to_close_s: the same from when it began to run. heartbeat_s: between its reports.
        num_cpus, num_gpus: reserved on the cluster while the step runs. options: further ones of Ray's, by their names.
        key: from inputs to a name for the result, the same in all runs that would get the same result; an earlier
            result of that name is taken. None: the step runs in each run.
        verify: raises when an earlier value is no longer usable; the step then runs.
        codec: JSON: the value is plain JSON; PICKLE: any object, or further steps to go on with.
        kept: whether the value is written down; if not, it is computed again when a later driver needs it.
        catches: whether an error becomes the value ``(None, error)``, and a value ``(value, None)``.
        hosted: `call` returns an awaitable that waits for something without work; it runs beside the driver and takes
            neither a worker nor a CPU. apart: in a process of the run's job, for the code is not this library's.
    """

    name: str
    call: Callable[[StepContext], Any]
    after: tuple[str, ...] = ()
    retry: RetryPolicy = field(default_factory=RetryPolicy)
    timeout_s: float | None = None
    start_to_close_s: float | None = None
    heartbeat_s: float | None = None
    num_cpus: float = 0.0
    num_gpus: float = 0.0
    options: Mapping[str, Any] = field(default_factory=dict)
    key: Callable[[Mapping[str, Any]], str] | None = None
    verify: Callable[[Any], None] | None = None
    codec: Codec = Codec.JSON
    kept: bool = True
    catches: bool = False
    hosted: bool = False
    apart: bool = False


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Steps in any order.

    Raises:
        UserError(SPEC_INVALID): a name is not usable or not unique, `after` names no step, or steps wait for one
            another.
    """

    steps: tuple[Step, ...]

    def __post_init__(self) -> None:
        names: set[str] = set()
        for step in self.steps:
            if not is_step_name(step.name):
                raise _invalid(step.name, "this cannot be the name of a step", "Use letters, digits, '.', '-' and '_'.")
            if step.name in names:
                raise _invalid(step.name, "two steps have this name", "Rename one of them.")
            names.add(step.name)
        for step in self.steps:
            for name in step.after:
                if name not in names:
                    close = difflib.get_close_matches(name, names, n=1)
                    hint = f"Did you mean {close[0]}?" if close else f"The steps are: {', '.join(sorted(names))}."
                    raise _invalid(step.name, f"the step is to run after {name!r}, which does not exist", hint)
        ordered = {step.name for step in self.in_order()}
        if len(ordered) < len(self.steps):
            stuck = ", ".join(step.name for step in self.steps if step.name not in ordered)
            raise _invalid(stuck, "these steps wait for each other", "Remove one of the references.")

    def in_order(self) -> list[Step]:
        """The steps, each behind all it waits for, otherwise as they were given."""
        followers: dict[str, list[int]] = {step.name: [] for step in self.steps}
        missing = [len(set(step.after)) for step in self.steps]
        for number, step in enumerate(self.steps):
            for name in set(step.after):
                followers[name].append(number)
        ready = [number for number, count in enumerate(missing) if count == 0]
        found = []
        while ready:
            step = self.steps[heapq.heappop(ready)]
            found.append(step)
            for number in followers[step.name]:
                missing[number] -= 1
                if missing[number] == 0:
                    heapq.heappush(ready, number)
        return found


def is_step_name(name: str) -> bool:
    """Whether a step may have this name: 1 to 100 letters, digits, dots, dashes and underscores, without ``..``."""
    return _NAME.fullmatch(name) is not None and ".." not in name


def _invalid(where: str, what: str, remedy: str) -> UserError:
    return UserError(ErrorCode.SPEC_INVALID, what, where=where, remedy=remedy)
