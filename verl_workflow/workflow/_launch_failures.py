"""What it means for an attempt when it was stopped, or when Ray could not run it or lost it."""

from __future__ import annotations

import re
from concurrent.futures import Future, InvalidStateError

from verl_workflow.errors import ErrorCode, UserError, VerlWorkflowError
from verl_workflow.workflow._attempt import Outcome, Raised
from verl_workflow.workflow._plan import Step


def resolve(future: Future[Outcome], outcome: Outcome) -> None:
    try:
        future.set_result(outcome)
    except InvalidStateError:
        # Finished while it was being cancelled: whichever came first counts.
        return


def stopped() -> Raised:
    return Raised.of(VerlWorkflowError(ErrorCode.CANCELLED, "the attempt was stopped", retryable=True))


def ray_failure(error: BaseException) -> Raised:
    from ray.exceptions import ObjectLostError, OutOfMemoryError, RayTaskError, TaskCancelledError

    if isinstance(error, TaskCancelledError):
        return stopped()
    cause = error.cause if isinstance(error, RayTaskError) else error
    if isinstance(cause, ObjectLostError):
        lost = VerlWorkflowError(
            ErrorCode.WORKER_LOST, f"a value that was not kept is lost with its node: {cause}", retryable=True
        )
        return Raised.of(lost, lost_inputs=True)
    if isinstance(error, RayTaskError):
        # `execute` lets nothing out: the worker did not get as far as calling it.
        unloadable = VerlWorkflowError(
            ErrorCode.STEP_FAILED,
            f"the step could not be loaded in its worker: {str(error).strip().splitlines()[-1]}",
            remedy="Make the modules its function needs importable on all nodes.",
        )
        return Raised.of(unloadable, text=str(error))
    remedy = ""
    if isinstance(error, OutOfMemoryError):
        remedy = "Ray's memory monitor ended it: lower its memory need, or run less at a time on the node."
    lost = VerlWorkflowError(
        ErrorCode.WORKER_LOST,
        f"the process of the step was lost: {type(error).__name__}: {_first_sentence(error)}",
        remedy=remedy,
        retryable=True,
    )
    return Raised.of(lost, crash=True)


def _first_sentence(error: BaseException) -> str:
    """Ray's further ones tell of commands for a cluster that may be gone; of memory all of it is of use."""
    from ray.exceptions import OutOfMemoryError

    text = str(error).strip()
    return text if isinstance(error, OutOfMemoryError) else re.split(r"(?<=\.)\s|\n", text, maxsplit=1)[0]


def unaskable(step: Step, error: Exception) -> UserError:
    return UserError(
        ErrorCode.SPEC_INVALID,
        f"Ray cannot reserve what the step needs: {error}",
        where=step.name,
        value={"num_cpus": step.num_cpus, "num_gpus": step.num_gpus, **step.options},
        remedy="Ask for whole GPUs above one, and for no finer shares than 0.0001.",
    )


def unsendable(step: str, error: Exception) -> VerlWorkflowError:
    return VerlWorkflowError(
        ErrorCode.STEP_FAILED,
        f"the step cannot be sent to a worker: {error}",
        where=step,
        remedy="Make its function and what it refers to picklable.",
    )


def unreadable(error: Exception) -> VerlWorkflowError:
    return VerlWorkflowError(
        ErrorCode.STEP_FAILED,
        f"what its worker has sent cannot be read by the driver: {type(error).__name__}: {error}",
        remedy="Give both the same version of verl_workflow.",
    )
