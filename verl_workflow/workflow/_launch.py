"""Where steps are executed: threads of this process, or Ray workers."""

from __future__ import annotations

import json
import threading
import traceback
from collections.abc import Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass
from typing import Any, Protocol

from verl_workflow.errors import ErrorCode, UserError, VerlWorkflowError
from verl_workflow.workflow._plan import Step, StepContext


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """How an attempt ended: `value`, the JSON bytes it returned, or `error`, what it raised as JSON."""

    value: bytes | None = None
    error: Mapping[str, Any] | None = None


class Launcher(Protocol):
    """Starts attempts and tells how they ended. Handles are opaque and hashable."""

    def start(self, step: Step, context: StepContext) -> Any: ...

    def ended(self, handles: Sequence[Any], timeout_s: float) -> dict[Any, Outcome]:
        """Those of `handles` that have ended, after at most `timeout_s` seconds of waiting for the first."""
        ...

    def cancel(self, handle: Any) -> None:
        """Stop the attempt, by force; its outcome no longer matters."""
        ...


def execute(step: Step, context: StepContext) -> Outcome:
    """Run one attempt here, and turn whatever it raises into an outcome."""
    try:
        value = step.call(context)
    except Exception as error:  # noqa: BLE001 - the boundary of user code: everything goes into the journal
        return Outcome(error=describe(error))
    try:
        return Outcome(value=json.dumps(value, allow_nan=False).encode())
    except (TypeError, ValueError) as error:
        what = f"the step returned what JSON cannot hold: {error}"
        return Outcome(error=UserError(ErrorCode.SPEC_INVALID, what, where=step.name).to_json())


def describe(error: BaseException) -> dict[str, Any]:
    """An exception as JSON: code, message, whether a new attempt makes sense, and the traceback."""
    trace = "".join(traceback.format_exception(error))[-20_000:]
    if isinstance(error, VerlWorkflowError):
        retryable = error.retryable and not isinstance(error, UserError)
        return {**error.to_json(), "retryable": retryable, "traceback": trace}
    unknown = VerlWorkflowError(ErrorCode.STEP_FAILED, f"{type(error).__name__}: {error}", retryable=True)
    return {**unknown.to_json(), "traceback": trace}


class InlineLauncher:
    """Threads of this process: for tests and light steps. A cancelled attempt runs on, and is forgotten."""

    def start(self, step: Step, context: StepContext) -> Future[Outcome]:
        future: Future[Outcome] = Future()

        def body() -> None:
            outcome = execute(step, context)
            if not future.cancelled():
                future.set_result(outcome)

        threading.Thread(target=body, name=f"step-{step.name}", daemon=True).start()
        return future

    def ended(self, handles: Sequence[Future[Outcome]], timeout_s: float) -> dict[Any, Outcome]:
        done, _ = wait(handles, timeout=timeout_s, return_when=FIRST_COMPLETED)
        return {future: future.result() for future in done}

    def cancel(self, handle: Future[Outcome]) -> None:
        handle.cancel()


class RayLauncher:
    """One Ray task an attempt, without Ray's own retries. Its worker dies with the driver that owns it."""

    def start(self, step: Step, context: StepContext) -> Any:
        import ray

        task = ray.remote(execute).options(
            name=f"{context.run_id}/{step.name}#{context.attempt}",
            num_cpus=step.num_cpus,
            num_gpus=step.num_gpus,
            max_retries=0,
        )
        return task.remote(step, context)

    def ended(self, handles: Sequence[Any], timeout_s: float) -> dict[Any, Outcome]:
        import ray

        ready, _ = ray.wait(list(handles), num_returns=len(handles), timeout=0)
        if not ready:
            ready, _ = ray.wait(list(handles), num_returns=1, timeout=timeout_s)
        return {handle: self._outcome(handle) for handle in ready}

    def cancel(self, handle: Any) -> None:
        import ray

        ray.cancel(handle, force=True)

    def _outcome(self, handle: Any) -> Outcome:
        import ray

        try:
            outcome = ray.get(handle)
        except ray.exceptions.RayTaskError as error:
            # `execute` lets nothing through: what comes here could not even be loaded in the worker.
            return Outcome(error=describe(error))
        except ray.exceptions.RayError as error:
            lost = VerlWorkflowError(
                ErrorCode.WORKER_LOST,
                f"the worker was lost ({type(error).__name__}: {str(error).strip().splitlines()[0]})",
                remedy="It was killed, ran out of memory, or its node is gone; see Ray's logs for which.",
                retryable=True,
            )
            return Outcome(error=lost.to_json())
        assert isinstance(outcome, Outcome)
        return outcome
