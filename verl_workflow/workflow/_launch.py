"""Where attempts run: in threads of this process, as Ray tasks, or, when they only wait, on an event loop."""

from __future__ import annotations

import asyncio
import dataclasses
import threading
from collections.abc import Mapping
from concurrent.futures import Future, InvalidStateError
from typing import Any, Protocol

from verl_workflow.errors import ErrorCode, UserError, VerlWorkflowError
from verl_workflow.workflow._attempt import Call, Outcome, Raised, Returned, execute, execute_apart, execute_hosted
from verl_workflow.workflow._plan import Step

_JOB = "VERL_WORKFLOW_JOB"


class Launcher(Protocol):
    """Starts and stops attempts. Every future ends with an Outcome; none raises."""

    def start(self, step: Step, call: Call, held: tuple[Any, ...] = ()) -> Future[Outcome]:
        """Begin an attempt and return at once.

        Args:
            held: values that are not kept, as earlier attempts returned them.
        """
        ...

    def cancel(self, future: Future[Outcome]) -> None:
        """End the attempt if it still runs; its future then ends with a Raised."""
        ...


class InlineLauncher:
    """Each attempt in a thread of this process. A cancelled one is let go: its thread runs on, unheeded."""

    def __init__(self) -> None:
        self._loop = _Loop()

    def start(self, step: Step, call: Call, held: tuple[Any, ...] = ()) -> Future[Outcome]:
        if step.hosted:
            return self._loop.start(call, held)
        future: Future[Outcome] = Future()
        name = f"{call.run.run_id}:{call.step}:{call.attempt}"
        threading.Thread(
            target=lambda: _resolve(future, _with_held(execute(call, *held), call.kept)), name=name, daemon=True
        ).start()
        return future

    def cancel(self, future: Future[Outcome]) -> None:
        _resolve(future, _stopped())
        self._loop.cancel(future)


class RayLauncher:
    """Each attempt as a Ray task owned by this process, with which it dies. Needs Ray to be initialised.

    Ray itself retries nothing: each attempt is one that the journal knows of. A cancelled attempt's worker is killed.

    Args:
        job: steps run in workers of their own for each job, for one that another job has used may have loaded modules
            that have changed since. None: in any worker.
        runtime_env: of the steps; what a step says itself is put over it.
    """

    def __init__(self, job: str | None = None, runtime_env: Mapping[str, Any] | None = None) -> None:
        import ray

        self._environment = dict(runtime_env or {})
        if job is not None:
            self._environment["env_vars"] = {**self._environment.get("env_vars", {}), _JOB: job}
        remote = ray.remote(runtime_env=self._environment) if self._environment else ray.remote
        self._execute = remote(execute)
        self._execute_apart = remote(execute_apart)
        self._refs: dict[Future[Outcome], Any] = {}
        self._loop = _Loop()

    def start(self, step: Step, call: Call, held: tuple[Any, ...] = ()) -> Future[Outcome]:
        if step.hosted:
            return self._loop.start(call, _fetched(held))
        future: Future[Outcome] = Future()
        try:
            options = {
                **step.options,
                "name": f"{call.run.run_id}:{call.step}:{call.attempt}",
                "num_cpus": step.num_cpus,
                "num_gpus": step.num_gpus,
                "max_retries": 0,
            }
            if "runtime_env" in options:
                own = options["runtime_env"]
                variables = {**self._environment.get("env_vars", {}), **own.get("env_vars", {})}
                options["runtime_env"] = {**self._environment, **own, "env_vars": variables}
            if call.kept:
                ref, apart = self._execute.options(**options).remote(call, *held), None
            else:
                ref, apart = self._execute_apart.options(**options, num_returns=2).remote(call, *held)
        except (TypeError, ValueError) as error:
            # Ray's words for quantities that it does not know, and for a function that cannot be pickled.
            unaskable = "resource" in str(error) or "option" in str(error)
            _resolve(future, Raised.of(_unaskable(step, error) if unaskable else _unsendable(call.step, error)))
            return future
        self._refs[future] = ref
        ref.future().add_done_callback(lambda done: self._ended(future, done, apart))
        return future

    def cancel(self, future: Future[Outcome]) -> None:
        import ray

        ref = self._refs.get(future)
        if ref is not None and not future.done():
            ray.cancel(ref, force=True)
        self._loop.cancel(future)

    def _ended(self, future: Future[Outcome], done: Future[Outcome], apart: Any) -> None:
        self._refs.pop(future, None)
        error = done.exception()
        outcome = done.result() if error is None else _ray_failure(error)
        if apart is not None and isinstance(outcome, Returned):
            outcome = dataclasses.replace(outcome, held=apart)
        _resolve(future, outcome)


class _Loop:
    """An event loop in a thread of its own, for attempts that only wait."""

    def __init__(self) -> None:
        self._running: asyncio.AbstractEventLoop | None = None
        self._lock = threading.Lock()
        self._tasks: dict[Future[Outcome], Future[Outcome]] = {}

    def start(self, call: Call, held: tuple[Any, ...]) -> Future[Outcome]:
        future: Future[Outcome] = Future()
        task = asyncio.run_coroutine_threadsafe(execute_hosted(call, *held), self._thread())
        self._tasks[future] = task
        task.add_done_callback(lambda done: self._ended(future, done, call.kept))
        return future

    def cancel(self, future: Future[Outcome]) -> None:
        task = self._tasks.get(future)
        if task is not None:
            task.cancel()

    def _ended(self, future: Future[Outcome], done: Future[Outcome], kept: bool) -> None:
        self._tasks.pop(future, None)
        if done.cancelled():
            _resolve(future, _stopped())
        elif (error := done.exception()) is not None:
            _resolve(future, Raised.of(error))
        else:
            _resolve(future, _with_held(done.result(), kept))

    def _thread(self) -> asyncio.AbstractEventLoop:
        with self._lock:
            if self._running is None:
                self._running = asyncio.new_event_loop()
                threading.Thread(target=self._running.run_forever, name="waiting steps", daemon=True).start()
            return self._running


def _with_held(outcome: Outcome, kept: bool) -> Outcome:
    if kept or not isinstance(outcome, Returned):
        return outcome
    return Returned(value=dataclasses.replace(outcome.value, inline=None), held=outcome.value.inline)


def _fetched(held: tuple[Any, ...]) -> tuple[Any, ...]:
    import ray

    return tuple(ray.get(each) if isinstance(each, ray.ObjectRef) else each for each in held)


def _resolve(future: Future[Outcome], outcome: Outcome) -> None:
    try:
        future.set_result(outcome)
    except InvalidStateError:
        # Finished while it was being cancelled: whichever came first counts.
        return


def _stopped() -> Raised:
    return Raised.of(VerlWorkflowError(ErrorCode.CANCELLED, "the attempt was stopped", retryable=True))


def _ray_failure(error: BaseException) -> Raised:
    from ray.exceptions import ObjectLostError, OutOfMemoryError, RayTaskError, TaskCancelledError

    if isinstance(error, TaskCancelledError):
        return _stopped()
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
        f"the process of the step was lost: {type(error).__name__}: {error}",
        remedy=remedy,
        retryable=True,
    )
    return Raised.of(lost, crash=True)


def _unaskable(step: Step, error: Exception) -> UserError:
    return UserError(
        ErrorCode.SPEC_INVALID,
        f"Ray cannot reserve what the step needs: {error}",
        where=step.name,
        value={"num_cpus": step.num_cpus, "num_gpus": step.num_gpus, **step.options},
        remedy="Ask for whole GPUs above one, and for no finer shares than 0.0001.",
    )


def _unsendable(step: str, error: Exception) -> VerlWorkflowError:
    return VerlWorkflowError(
        ErrorCode.STEP_FAILED,
        f"the step cannot be sent to a worker: {error}",
        where=step,
        remedy="Make its function and what it refers to picklable.",
    )
