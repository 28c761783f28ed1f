"""Keeps what an attempt comes to, as it goes on and when it ends, and tells what follows."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from verl_workflow.errors import ErrorCode, FencedError, UserError, VerlWorkflowError
from verl_workflow.spec._failure_class import FailureClass
from verl_workflow.spec._training import VerlStage
from verl_workflow.training._attempt import Attempt
from verl_workflow.training._discard import discard
from verl_workflow.training._history import Outcome, record
from verl_workflow.training._layout import needed
from verl_workflow.training._outcome import AttemptFailed, alarmed, as_error, failure_behind
from verl_workflow.training._owner import saving_folder
from verl_workflow.training._retry import decide, exhausted
from verl_workflow.training._watch import Watch
from verl_workflow.training.failures import ADVICE, Failure

if TYPE_CHECKING:
    from verl_workflow.pipeline._context import StageContext

_HEARTBEAT_SECONDS = 15.0
_log = logging.getLogger(__name__)


@dataclass(kw_only=True)
class Tally:
    """What is counted while an attempt runs.

    Attributes:
        start: the step it resumed from, 0 for none. seconds: for which verl's process ran. warnings: of its guards.
        drained: nodes of it that Ray said are being taken away.
    """

    start: int = 0
    drained: tuple[str, ...] = ()
    seconds: float = 0.0
    warnings: list[str] = field(default_factory=list)

    @contextmanager
    def training(self) -> Iterator[None]:
        """Counts the time within."""
        began = time.monotonic()
        try:
            yield
        finally:
            self.seconds += time.monotonic() - began


@dataclass(kw_only=True)
class Signs:
    """Hands the news of a training on: progress, at least every 15 s, and what its guards say."""

    watch: Watch
    tally: Tally
    report: Callable[[Mapping[str, Any]], None]
    _told: float = field(default=-_HEARTBEAT_SECONDS, init=False)

    def look(self, now: float) -> bool:
        """Whether there is news; raises AttemptFailed when a guard stops the training."""
        news = self.watch.look(now)
        if news is not None or now - self._told >= _HEARTBEAT_SECONDS:
            self._told = now
            warning = {"warning": self.tally.warnings[-1]} if self.tally.warnings else {}
            self.report({**(news or self.watch.progress()), **warning})
        for alarm in self.watch.alarms():
            if alarm.guard.policy != "warn":
                raise alarmed(alarm)
            self.tally.warnings.append(alarm.what)
            self.report({**self.watch.progress(), "warning": alarm.what})
        return news is not None


def require_attempts_left(spec: VerlStage, history: Sequence[Outcome], ctx: StageContext) -> None:
    """Raise VerlWorkflowError(STEP_FAILED), for good, when the attempts are used up."""
    if why := exhausted(spec, history, ctx.epoch):
        raise VerlWorkflowError(
            ErrorCode.STEP_FAILED,
            why,
            where=ctx.stage,
            remedy=f"`verl-workflow explain {ctx.run_id}` tells what each came to; `resume` gives it further attempts.",
        )


@contextmanager
def recorded(attempt: Attempt, history: Sequence[Outcome]) -> Iterator[Tally]:
    """Keep the outcome of what happens within; a failure leaves as an error that says whether another attempt follows.

    Args:
        history: outcomes of the attempts before.
    """
    ctx, tally = attempt.ctx, Tally()
    accelerators = needed(attempt.chosen).gpus if attempt.chosen["trainer.device"] != "cpu" else 0
    begun = Outcome(attempt=ctx.attempt, epoch=ctx.epoch, began=time.time(), gpus=accelerators, changes=attempt.changes)
    record(ctx.attempt_dir, begun)

    def ended(failure: Failure | None) -> Outcome:
        own = [row.step for row in attempt.own_rows() if row.trained]
        newest = attempt.newest()
        return replace(
            begun,
            ended=time.time(),
            trained_s=tally.seconds,
            start=tally.start,
            reached=max(own, default=tally.start),
            saved=newest.step if newest else 0,
            failure=failure,
        )

    try:
        yield tally
    except FencedError:
        raise
    except Exception as error:
        outcome = ended(failure_behind(error))
        _keep(attempt, outcome)
        decision = decide(attempt.spec, [*history, outcome], attempt.written)
        if isinstance(error, UserError):
            raise
        raise as_error(attempt, error, decision) from (error.__cause__ if isinstance(error, AttemptFailed) else error)
    except BaseException:
        # Cancelled: Ray raises KeyboardInterrupt in the step, or ends it by SystemExit.
        kind = FailureClass.CANCELLED
        stopped = Failure(kind=kind, what="the attempt was stopped", advice=ADVICE[kind])
        _keep(attempt, ended(stopped))
        raise
    else:
        record(ctx.attempt_dir, ended(None))


def _keep(attempt: Attempt, outcome: Outcome) -> None:
    """Record how an attempt failed; on a full disk in the room that its half-written checkpoint took."""
    try:
        record(attempt.ctx.attempt_dir, outcome)
    except OSError:
        with suppress(OSError):
            discard(saving_folder(attempt.checkpoint_dir, attempt.owner))
        try:
            record(attempt.ctx.attempt_dir, outcome)
        except OSError as error:
            # What the attempt failed of is told all the same, by the error that is on its way.
            _log.warning("the outcome of attempt %d could not be kept: %s", outcome.attempt, error)
