"""Where attempts run: in threads of this process, as Ray tasks, or, when they only wait, on an event loop."""

from __future__ import annotations

import dataclasses
import pickle
import threading
from collections.abc import Mapping
from concurrent.futures import Future
from typing import Any, Protocol

from verl_workflow.workflow._attempt import (
    Call,
    Outcome,
    Raised,
    Returned,
    execute,
    execute_apart,
    execute_packed,
    packed,
)
from verl_workflow.workflow._launch_failures import ray_failure, resolve, stopped, unaskable, unreadable, unsendable
from verl_workflow.workflow._plan import Step
from verl_workflow.workflow._waiting import WaitingProcess, fetched, waiting_loop, with_held

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
        self._loop = waiting_loop()

    def start(self, step: Step, call: Call, held: tuple[Any, ...] = ()) -> Future[Outcome]:
        if step.hosted:
            return self._loop.start(call, held)
        future: Future[Outcome] = Future()
        name = f"{call.run.run_id}:{call.step}:{call.attempt}"
        threading.Thread(
            target=lambda: resolve(future, with_held(execute(call, *held), call.kept)), name=name, daemon=True
        ).start()
        return future

    def cancel(self, future: Future[Outcome]) -> None:
        resolve(future, stopped())
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
        self._execute = remote(execute_packed)
        self._execute_apart = remote(execute_apart)
        self._refs: dict[Future[Outcome], Any] = {}
        self._loop = waiting_loop()
        self._apart = WaitingProcess(self._environment)

    def start(self, step: Step, call: Call, held: tuple[Any, ...] = ()) -> Future[Outcome]:
        future: Future[Outcome]
        if step.apart:
            return self._apart.start(call, held)
        if step.hosted:
            try:
                found = fetched(held)
            except Exception as error:  # noqa: BLE001 - whatever Ray says of a value that it has lost
                future = Future()
                resolve(future, ray_failure(error))
                return future
            return self._loop.start(call, found)
        future = Future()
        try:
            data = packed(call)
        except Exception as error:  # noqa: BLE001 - pickling calls the user's own methods
            resolve(future, Raised.of(unsendable(call.step, error)))
            return future
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
                ref, apart = self._execute.options(**options).remote(data, *held), None
            else:
                ref, apart = self._execute_apart.options(**options, num_returns=2).remote(data, *held)
        except (TypeError, ValueError) as error:
            # Ray's words for quantities that it does not know.
            resolve(future, Raised.of(unaskable(step, error)))
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
        self._apart.cancel(future)

    def _ended(self, future: Future[Outcome], done: Future[bytes], apart: Any) -> None:
        self._refs.pop(future, None)
        error = done.exception()
        try:
            outcome: Outcome = pickle.loads(done.result()) if error is None else ray_failure(error)
        except Exception as problem:  # noqa: BLE001 - an attempt that is never heard of again would be waited for
            outcome = Raised.of(unreadable(problem))
        if apart is not None and isinstance(outcome, Returned):
            outcome = dataclasses.replace(outcome, held=apart)
        resolve(future, outcome)
