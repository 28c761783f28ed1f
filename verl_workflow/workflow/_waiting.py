"""Where attempts wait that only wait: many together, and none of them holds a worker or a CPU."""

from __future__ import annotations

import asyncio
import collections
import dataclasses
import functools
import threading
from collections.abc import Mapping
from concurrent.futures import Future
from typing import Any

from verl_workflow.workflow._attempt import Call, Outcome, Raised, Returned, execute_hosted
from verl_workflow.workflow._launch_failures import ray_failure, resolve, stopped
from verl_workflow.workflow._names import RunKey

# Its start takes a second or two, so that it stays for the next of a chain.
_LINGER_S = 60.0
# Ray cancels by an exception, which a bare `except:` swallows.
_GRACE_S = 5.0
# Which process: at first all are together; the eight that they are spread over when it dies; the eight of one of these.
_Group = tuple[int, ...]
_TOGETHER: _Group = ()
_APART = 8


class WaitingLoop:
    """An event loop in a thread of this process. Only for this library's code, as all runs share it."""

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
            resolve(future, stopped())
        elif (error := done.exception()) is not None:
            resolve(future, Raised.of(error))
        else:
            resolve(future, with_held(done.result(), kept))

    def _thread(self) -> asyncio.AbstractEventLoop:
        with self._lock:
            if self._running is None:
                self._running = asyncio.new_event_loop()
                threading.Thread(target=self._running.run_forever, name="waiting steps", daemon=True).start()
            return self._running


@functools.cache
def waiting_loop() -> WaitingLoop:
    """The one of this process: its thread never ends."""
    return WaitingLoop()


class WaitingProcess:
    """An actor with an event loop, started when the first attempt needs it and ended a minute after the last.

    If it dies, by an attempt that ends its process, all others die with it. Those that were in it go on in several, and
    so on if one of these dies: whoever waits beside a bad one loses few attempts by it, however many they are. One that
    does not stop when it is cancelled is a bad one too: its process is ended.

    Args:
        environment: the runtime_env of the job whose code it runs.
    """

    def __init__(self, environment: Mapping[str, Any]) -> None:
        self._environment = dict(environment)
        self._lock = threading.Lock()
        self._actors: dict[_Group, Any] = {}
        self._refs: dict[Future[Outcome], tuple[Any, Any]] = {}
        self._waiting: collections.Counter[_Group] = collections.Counter()
        # Those that have lost an attempt with their process, and how many of each group have.
        self._groups: dict[tuple[RunKey, str], _Group] = {}
        self._dealt: collections.Counter[_Group] = collections.Counter()
        self._end: threading.Timer | None = None

    def start(self, call: Call, held: tuple[Any, ...]) -> Future[Outcome]:
        future: Future[Outcome] = Future()
        step = call.run, call.step
        with self._lock:
            group = self._groups.get(step, _TOGETHER)
            if self._end is not None:
                self._end.cancel()
                self._end = None
            actor = self._actors.get(group)
            if actor is None:
                actor = self._actors[group] = self._started()
            self._waiting[group] += 1
            ref = actor.execute.remote(call, *held)
            self._refs[future] = ref, actor
        ref.future().add_done_callback(lambda done: self._ended(future, done, step, group, actor))
        return future

    def cancel(self, future: Future[Outcome]) -> None:
        import ray

        ref, _ = self._refs.get(future, (None, None))
        if ref is not None and not future.done():
            ray.cancel(ref)
            timer = threading.Timer(_GRACE_S, self._end_unheeding, [future])
            timer.daemon = True
            timer.start()

    def _end_unheeding(self, future: Future[Outcome]) -> None:
        import ray

        with self._lock:
            _, actor = self._refs.get(future, (None, None))
        if actor is not None and ray.is_initialized():
            ray.kill(actor)

    def _started(self) -> Any:
        import ray

        options: dict[str, Any] = {"num_cpus": 0, "max_concurrency": 100_000}
        if self._environment:
            options["runtime_env"] = self._environment
        return ray.remote(_Waiting).options(**options).remote()

    def _ended(
        self, future: Future[Outcome], done: Future[Outcome], step: tuple[RunKey, str], group: _Group, actor: Any
    ) -> None:
        from ray.exceptions import RayActorError

        error = done.exception()
        with self._lock:
            del self._refs[future]
            self._waiting[group] -= 1
            self._groups.pop(step, None)
            if isinstance(error, RayActorError):
                if self._actors.get(group) is actor:
                    del self._actors[group]
                self._groups[step] = (*group, self._dealt[group] % _APART)
                self._dealt[group] += 1
            if group != _TOGETHER and not self._waiting[group]:
                self._actors.pop(group, None)
            if not self._refs:
                self._end = threading.Timer(_LINGER_S, self._let_go)
                self._end.daemon = True
                self._end.start()
        resolve(future, done.result() if error is None else ray_failure(error))

    def _let_go(self) -> None:
        with self._lock:
            if not self._refs:
                # Ray ends an actor that nobody has a handle of.
                self._actors.clear()


class _Waiting:
    """The actor's class."""

    async def execute(self, call: Call, *held: bytes) -> Outcome:
        return await execute_hosted(call, *held)


def with_held(outcome: Outcome, kept: bool) -> Outcome:
    if kept or not isinstance(outcome, Returned):
        return outcome
    return Returned(value=dataclasses.replace(outcome.value, inline=None), held=outcome.value.inline)


def fetched(held: tuple[Any, ...]) -> tuple[Any, ...]:
    import ray

    return tuple(ray.get(each) if isinstance(each, ray.ObjectRef) else each for each in held)
