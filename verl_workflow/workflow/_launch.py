"""Where attempts run: in threads of this process, or as Ray tasks."""

from __future__ import annotations

import threading
from concurrent.futures import Future, InvalidStateError
from typing import Any, Protocol

from verl_workflow.errors import ErrorCode, UserError, VerlWorkflowError
from verl_workflow.workflow._attempt import Call, Outcome, Raised, execute
from verl_workflow.workflow._plan import Step


class Launcher(Protocol):
    """Starts and stops attempts. Every future ends with an Outcome; none raises."""

    def start(self, step: Step, call: Call) -> Future[Outcome]:
        """Begin an attempt and return at once."""
        ...

    def cancel(self, future: Future[Outcome]) -> None:
        """End the attempt if it still runs; its future then ends with a Raised."""
        ...


class InlineLauncher:
    """Each attempt in a thread of this process. A cancelled one is let go: its thread runs on, unheeded."""

    def start(self, step: Step, call: Call) -> Future[Outcome]:
        future: Future[Outcome] = Future()
        name = f"{call.run_id}:{call.step}:{call.attempt}"
        threading.Thread(target=lambda: _resolve(future, execute(call)), name=name, daemon=True).start()
        return future

    def cancel(self, future: Future[Outcome]) -> None:
        _resolve(future, _stopped())


class RayLauncher:
    """Each attempt as a Ray task owned by this process, with which it dies. Needs Ray to be initialised.

    Ray itself retries nothing: each attempt is one that the journal knows of. A cancelled attempt's worker is killed.
    """

    def __init__(self) -> None:
        import ray

        self._execute = ray.remote(execute)
        self._refs: dict[Future[Outcome], Any] = {}

    def start(self, step: Step, call: Call) -> Future[Outcome]:
        future: Future[Outcome] = Future()
        try:
            task = self._execute.options(
                name=f"{call.run_id}:{call.step}:{call.attempt}",
                num_cpus=step.num_cpus,
                num_gpus=step.num_gpus,
                max_retries=0,
            )
            ref = task.remote(call)
        except (TypeError, ValueError) as error:
            # Ray's words for quantities that it does not know, and for a function that cannot be pickled.
            unaskable = "resource" in str(error)
            _resolve(future, Raised.of(_unaskable(step, error) if unaskable else _unsendable(call.step, error)))
            return future
        self._refs[future] = ref
        ref.future().add_done_callback(lambda done: self._ended(future, done))
        return future

    def cancel(self, future: Future[Outcome]) -> None:
        import ray

        ref = self._refs.get(future)
        if ref is not None and not future.done():
            ray.cancel(ref, force=True)

    def _ended(self, future: Future[Outcome], done: Future[Outcome]) -> None:
        self._refs.pop(future, None)
        error = done.exception()
        _resolve(future, done.result() if error is None else _ray_failure(error))


def _resolve(future: Future[Outcome], outcome: Outcome) -> None:
    try:
        future.set_result(outcome)
    except InvalidStateError:
        # Finished while it was being cancelled: whichever came first counts.
        return


def _stopped() -> Raised:
    return Raised.of(VerlWorkflowError(ErrorCode.CANCELLED, "the attempt was stopped", retryable=True))


def _ray_failure(error: BaseException) -> Raised:
    from ray.exceptions import OutOfMemoryError, RayTaskError, TaskCancelledError

    if isinstance(error, TaskCancelledError):
        return _stopped()
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
    return Raised.of(
        VerlWorkflowError(
            ErrorCode.WORKER_LOST,
            f"the process of the step was lost: {type(error).__name__}: {error}",
            remedy=remedy,
            retryable=True,
        )
    )


def _unaskable(step: Step, error: Exception) -> UserError:
    return UserError(
        ErrorCode.SPEC_INVALID,
        f"Ray cannot reserve what the step needs: {error}",
        where=step.name,
        value={"num_cpus": step.num_cpus, "num_gpus": step.num_gpus},
        remedy="Ask for whole GPUs above one, and for no finer shares than 0.0001.",
    )


def _unsendable(step: str, error: Exception) -> VerlWorkflowError:
    return VerlWorkflowError(
        ErrorCode.STEP_FAILED,
        f"the step cannot be sent to a worker: {error}",
        where=step,
        remedy="Make its function and what it refers to picklable.",
    )
