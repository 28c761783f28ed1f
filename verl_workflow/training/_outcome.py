"""What an attempt came to: its failure in words, or the proof that it trained."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from verl_workflow.errors import ErrorCode, UserError, VerlWorkflowError
from verl_workflow.spec._failure_class import FailureClass
from verl_workflow.training import _checkpoints, _metrics
from verl_workflow.training._attempt import RESULT, Attempt
from verl_workflow.training._disk import full
from verl_workflow.training._guards import Alarm
from verl_workflow.training._process import tail
from verl_workflow.training.failures import ADVICE, Failure, diagnose

if TYPE_CHECKING:
    from verl_workflow.training._retry import Decision

_LAST_WORDS = 20
_FRAMES = 5
# What a process of Ray writes when it is told to end, as verl's is at the end of each attempt.
_OWN_END = re.compile(r"^.*\*\*\* SIGTERM received at time=", re.MULTILINE)
_LOG_LINES = 1_000_000
_LOG_BYTES = 16 << 20
_CODES = {FailureClass.STALL: ErrorCode.NO_PROGRESS, FailureClass.CAPACITY: ErrorCode.CAPACITY}
_FILED = {
    ErrorCode.CAPACITY: FailureClass.CAPACITY,
    ErrorCode.CHECKPOINT_INVALID: FailureClass.CHECKPOINT,
    ErrorCode.DATA_INVALID: FailureClass.DATA,
    ErrorCode.NO_PROGRESS: FailureClass.STALL,
    ErrorCode.OVERRIDE_INVALID: FailureClass.CONFIGURATION,
    ErrorCode.REWARD_INVALID: FailureClass.REWARD,
    ErrorCode.STORAGE: FailureClass.DISK,
}


# What an attempt looks like that found no room for its words; any other class has evidence of its own.
_OF_FULL_DISK = frozenset({FailureClass.CHECKPOINT, FailureClass.INFRASTRUCTURE, FailureClass.UNKNOWN})


class AttemptFailed(Exception):
    """An attempt ended without success.

    Args:
        failure: why.
        back_to: first step whose checkpoint must not be resumed from; None: all may.
        since: the step at which the trouble began, when a guard has seen it.
    """

    def __init__(self, failure: Failure, *, back_to: int | None = None, since: int | None = None) -> None:
        super().__init__(failure.what)
        self.failure = failure
        self.back_to = back_to
        self.since = since


def alarmed(alarm: Alarm) -> AttemptFailed:
    """A guard stops the training, or takes it back to before what it has found."""
    rolls_back = alarm.guard.policy == "rollback"
    own = alarm.guard.check == "when"
    mend = "Look at the metrics" if own else "Lower the learning rate or the clip range"
    remedy = (
        f"The checkpoints since step {alarm.since} are set aside."
        if rolls_back
        else f"{mend}, and start a new run; or let the guard roll back or warn."
    )
    what = f"a guard found that {alarm.what}" if own else f"the guard {alarm.guard.check} found: {alarm.what}"
    failure = _of_numbers(what, alarm.what, remedy)
    return AttemptFailed(failure, back_to=alarm.since if rolls_back else None, since=alarm.since)


def _of_numbers(what: str, found: str, remedy: str) -> Failure:
    """Numbers that are none: the reward's own fault when it began there."""
    if f"{_metrics.REWARD} " in found or f"{_metrics.REWARD}," in found:
        advice = f"The reward gave a number that is none, and all else follows. {ADVICE[FailureClass.REWARD]}"
        return Failure(kind=FailureClass.REWARD, what=what, evidence=(found,), advice=advice)
    return Failure(kind=FailureClass.NUMERIC, what=what, evidence=(found,), advice=remedy)


def stuck(attempt: Attempt, reason: str, frames: Sequence[str]) -> AttemptFailed:
    """The training stands still, and was stopped.

    Args:
        frames: where its processes were in the user's code.
    """
    stacks = attempt.ctx.attempt_dir / "stacks"
    advice = f"It was stopped and can be resumed. What each process was doing is in {stacks}."
    if frames:
        advice = f"{advice} Look first at why your own code does not return: {frames[0]}."
    what = f"the training stands still: {reason}"
    evidence = (reason, *frames[: _FRAMES - 1])
    return AttemptFailed(Failure(kind=FailureClass.STALL, what=what, evidence=evidence, advice=advice))


def no_room(lacking: str) -> AttemptFailed:
    """The training was stopped before it wrote half a checkpoint."""
    return AttemptFailed(
        Failure(
            kind=FailureClass.DISK,
            what=f"the training was stopped before a save: {lacking}",
            evidence=(lacking,),
            advice=ADVICE[FailureClass.DISK],
        )
    )


def require_success(
    attempt: Attempt, code: int, start: _checkpoints.Checkpoint | None, *, drained: Sequence[str] = ()
) -> None:
    """Raise AttemptFailed unless verl's process says that all went well.

    Args:
        code: its exit code. start: the checkpoint that it resumed from; set aside when it could not be loaded.
        drained: nodes of the training that were being drained.
    """
    result = _result(attempt)
    if result is not None and result["ok"] and code == 0:
        return
    failure = diagnose(
        result=result,
        code=code,
        log=tail(attempt.log, _LOG_LINES, _LOG_BYTES),
        code_dir=attempt.ctx.code_dir,
        drained=drained,
        resumed=start is not None,
    )
    if failure.kind in _OF_FULL_DISK and (lacking := full(attempt.checkpoint_dir)):
        # What verl would have said of it found no room.
        evidence = (lacking, *failure.evidence)[:5]
        failure = Failure(kind=FailureClass.DISK, what=lacking, evidence=evidence, advice=ADVICE[FailureClass.DISK])
    if failure.kind is FailureClass.CHECKPOINT and start is not None:
        attempt.require_owner()
        _checkpoints.quarantine(start)
    raise AttemptFailed(replace(failure, what=f"the training failed ({failure.kind.value}): {failure.what}"))


def _result(attempt: Attempt) -> Mapping[str, Any] | None:
    try:
        found = json.loads((attempt.ctx.attempt_dir / RESULT).read_text(encoding="utf-8"))
    except (FileNotFoundError, ValueError):
        return None
    return found if isinstance(found, Mapping) and "ok" in found else None


def proven(attempt: Attempt, start: _checkpoints.Checkpoint | None) -> _checkpoints.Checkpoint:
    """The final checkpoint, after proof that the planned step was reached and saved."""
    spec = attempt.spec
    require_finite(attempt)
    reached = max((row.step for row in attempt.rows() if row.trained), default=0)
    # verl forgets the checkpoints of earlier attempts: only here are they pruned.
    done, broken = attempt.tidied()
    if reached < spec.steps or done is None or done.step < spec.steps:
        begun = start.step if start else 0
        what = (
            f"verl ended without an error at step {reached} of {spec.steps} (begun at {begun}, "
            f"newest valid checkpoint: {done.step if done else 'none'})" + "".join(f"; {reason}" for reason in broken)
        )
        raise AttemptFailed(
            Failure(
                kind=FailureClass.STALL,
                what=what,
                evidence=(what,),
                advice="Look in the log for what ended it.",
                # Going on from where it stopped helps only when it moved at all.
                final=reached <= begun,
            )
        )
    return done


def require_finite(attempt: Attempt) -> None:
    """verl passes over updates that are not finite and ends with success: the last step's numbers must be numbers."""
    trained = [row for row in attempt.rows() if row.trained]
    if trained and (bad := _metrics.non_finite(trained[-1])):
        what = f"{', '.join(bad)} {'is' if len(bad) == 1 else 'are'} not finite at step {trained[-1].step}"
        remedy = f"Lower the learning rate or the clip range, and start a new run. Its metrics: {attempt.metrics}"
        raise AttemptFailed(_of_numbers(f"the training is numerically dead: {what}", what, remedy))


def failure_behind(error: Exception) -> Failure:
    """What an error that ended an attempt is filed under."""
    if isinstance(error, AttemptFailed):
        return error.failure
    if isinstance(error, VerlWorkflowError):
        kind = _FILED.get(error.code, FailureClass.UNKNOWN)
        what = f"{error.where}: {error.what}" if error.where else error.what
        return Failure(kind=kind, what=what, evidence=(what,), advice=error.remedy, final=not error.retryable)
    what = f"{type(error).__name__}: {error}"
    kind = FailureClass.INFRASTRUCTURE if type(error).__module__.startswith("ray.") else FailureClass.UNKNOWN
    return Failure(kind=kind, what=what, evidence=(what,), advice="Read the log; resume when the cause is gone.")


def as_error(attempt: Attempt, error: Exception, decision: Decision) -> VerlWorkflowError:
    """The error by which an attempt ends, which says whether another one follows."""
    if isinstance(error, VerlWorkflowError):
        remedy = f"{error.remedy} {decision.why}".strip()
        told = VerlWorkflowError(error.code, error.what, where=error.where, value=error.value, remedy=remedy)
        told.retryable = decision.again
        return told
    failure = failure_behind(error)
    if failure.kind is FailureClass.REWARD:
        return UserError(ErrorCode.REWARD_INVALID, failure.what, where=attempt.ctx.stage, remedy=failure.advice)
    words = _OWN_END.split(tail(attempt.log, _LAST_WORDS), maxsplit=1)[0].rstrip()
    last_words = f" Last words of {attempt.log}:\n{words}" if words else ""
    return VerlWorkflowError(
        _CODES.get(failure.kind, ErrorCode.TRAINING_FAILED),
        failure.what,
        where=attempt.ctx.stage,
        remedy=f"{failure.advice} {_left(attempt, error)}{decision.why}{last_words}".strip(),
        retryable=decision.again,
    )


def _left(attempt: Attempt, error: Exception) -> str:
    """What there is to go on from, in a sentence; nothing when there is nothing to say."""
    since = error.since if isinstance(error, AttemptFailed) else None
    if since is None:
        newest = attempt.newest()
        return f"The newest whole checkpoint is that of step {newest.step}. " if newest else ""
    before = [found.step for found in _checkpoints.checkpoints(attempt.checkpoint_dir) if found.step < since]
    return f"The last checkpoint from before it is that of step {before[-1]}. " if before else ""
