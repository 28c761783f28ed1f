"""The actor that drives workflows: one for a storage and cluster, which outlives whoever started it.

It keeps nothing that is not in the storage too: when Ray rebuilds it on another node, it goes on with the workflows
that it was driving, and with those that were waiting for their turn.
"""

from __future__ import annotations

import asyncio
import collections
import logging
import queue
import secrets
import threading
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

from verl_workflow.errors import ErrorCode, UserError, VerlWorkflowError
from verl_workflow.storage import Store
from verl_workflow.workflow._client import Caller
from verl_workflow.workflow._definition import create_run, read_definition, run_key
from verl_workflow.workflow._driver import Driver
from verl_workflow.workflow._fold import TERMINAL_STATES, RunStatus
from verl_workflow.workflow._host_life import HostLife
from verl_workflow.workflow._launch import RayLauncher
from verl_workflow.workflow._names import RunKey, path_part
from verl_workflow.workflow._outputs import Delivered, is_elsewhere, output_to_deliver
from verl_workflow.workflow._owner import this_process
from verl_workflow.workflow._records import StepsReset
from verl_workflow.workflow._state import list_runs, read_graph, read_run
from verl_workflow.workflow._turn import Turn, clear_turn, read_turn, record_turn

_AGAIN_S = 1.0
_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class _Order:
    """A workflow to be driven. Attributes: see `WorkflowHost.begin` and `Driver`."""

    run: RunKey
    caller: Caller
    reset: StepsReset | None = None
    resumed: bool = False

    @property
    def run_id(self) -> str:
        return self.run.run_id


class WorkflowHost:
    """The actor's class.

    Args:
        token: of this host, the same when it is rebuilt. running, pending: how many workflows at a time; -1: any.
    """

    def __init__(self, store: Store, token: str, running: int, pending: int) -> None:
        self._store = store
        self._token = token
        self._limits = running, pending
        self._driven: dict[str, asyncio.Future[BaseException | None]] = {}
        self._waiting: collections.deque[_Order] = collections.deque()
        self._taken_up: set[str] = set()
        # Folders of workflows of which the storage does not say yet whether they are to be taken up.
        self._unread: set[str] = set()
        # How many are being recorded, for which there has to be room.
        self._beginning = 0
        self._launchers: dict[str, RayLauncher] = {}
        self._life = HostLife(store, token)
        self._life.start()
        self._recovered = asyncio.ensure_future(self._recover())

    async def hello(self, running: int | None, pending: int | None, durability: str | None = None) -> str:
        """The host's token. Raises ValueError when it was started with other limits."""
        if any(theirs not in (None, mine) for mine, theirs in zip(self._limits, (running, pending), strict=True)):
            raise ValueError(
                "The workflow init is called again but the init options do not match the original ones. Original "
                f"options: max_running_workflows={self._limits[0]} max_pending_workflows={self._limits[1]}; "
                f"New options: max_running_workflows={running} max_pending_workflows={pending}."
            )
        if durability not in (None, self._store.durability):
            raise ValueError(
                f"The workflows' host on this cluster was started with durability={self._store.durability!r}, not "
                f"{durability!r}."
            )
        return self._token

    async def begin(
        self,
        run: RunKey,
        definition: dict[str, Any],
        caller: Caller,
        seed: Sequence[dict[str, Any]] = (),
    ) -> None:
        """Record a new workflow and drive it, now or when its turn has come.

        Both are done here, lest one be recorded that nobody drives when the caller dies in between.

        Args:
            run: the same when Ray makes this call again, as this process had died.
            caller: its job; steps of one job share no worker with another one's, whose modules may be older.
            seed: events to begin with.

        Raises:
            RuntimeError: there is one of this id. queue.Full: too many are waiting; nothing was written.
        """
        await self._has_recovered(run.run_id)
        known = self._driven.get(run.run_id)
        if known is None and not self._has_room() and not await asyncio.to_thread(self._has_begun, run):
            raise _full()
        if known is not None and not await asyncio.to_thread(self._has_begun, run):
            # One that was deleted while it ran, and does not know of it yet: recorded now, this one would be nobody's.
            raise _taken(run.run_id)
        self._beginning += 1
        try:
            await asyncio.to_thread(
                create_run,
                self._store,
                run.run_id,
                definition,
                incarnation=run.incarnation,
                host=self._token,
                seed=list(seed),
            )
        except UserError as error:
            if error.code is not ErrorCode.RUN_EXISTS:
                raise
            if not await asyncio.to_thread(self._has_begun, run):
                raise _taken(run.run_id) from error
            if run.run_id in self._driven or await asyncio.to_thread(self._has_ended, run.run_id):
                return
            # Recorded by this very call, whose answer was lost, or by it in a process before this one.
        finally:
            self._beginning -= 1
        self._submit(_Order(run=run, caller=caller))

    async def submit(self, run_id: str, caller: Caller, reset: StepsReset | None = None) -> None:
        """Drive a recorded workflow, now or when its turn has come.

        Raises:
            RuntimeError: it is driven here already. queue.Full: too many are waiting.
        """
        await self._has_recovered(run_id)
        if run_id in self._taken_up and run_id in self._driven:
            # Ray makes the calls again that died with the process before; what this one asked for is under way.
            self._taken_up.discard(run_id)
            return
        if any(order.run_id == run_id and self._was_withdrawn(order) for order in self._waiting):
            await self.withdraw(run_id)
        run = await asyncio.to_thread(run_key, self._store, run_id)
        if run_id not in self._driven and not self._has_room():
            raise _full()
        self._submit(_Order(run=run, caller=caller, reset=reset, resumed=True))

    async def wait(self, run_id: str) -> BaseException | None:
        """Wait until a workflow is not driven here any more; gives what stopped its driver, None when it has ended."""
        await self._has_recovered(run_id)
        future = self._driven.get(run_id)
        return None if future is None else await asyncio.shield(future)

    async def output(self, run_id: str, task_id: str | None) -> Delivered:
        """The output of a workflow, driven here or elsewhere, once it is there. Raises as `get_output`."""
        stopped = await self.wait(run_id) if task_id is None else None
        if stopped is not None and not is_elsewhere(stopped):
            raise stopped
        return await output_to_deliver(self._store, run_id, task_id)

    async def withdraw(self, run_id: str) -> bool:
        """Take a workflow out of the queue; False when it is not in it."""
        await self._has_recovered(run_id)
        for place, order in enumerate(self._waiting):
            if order.run_id == run_id:
                clear_turn(self._store, order.run)
                del self._waiting[place]
                future = self._driven.pop(run_id)
                future.set_result(None)
                return True
        return False

    def _has_begun(self, run: RunKey) -> bool:
        """Whether the process before this one has recorded the workflow, which then was taken up already."""
        try:
            return run_key(self._store, run.run_id) == run
        except UserError:
            return False

    def _has_room(self) -> bool:
        running, pending = self._limits
        return running < 0 or pending < 0 or len(self._driven) + self._beginning < running + pending

    def _active(self) -> list[str]:
        waiting = {order.run_id for order in self._waiting}
        return [run_id for run_id in self._driven if run_id not in waiting]

    def _submit(self, order: _Order) -> None:
        if order.run_id in self._driven:
            raise _taken(order.run_id)
        running, _ = self._limits
        if running >= 0 and len(self._active()) >= running:
            if order.resumed:
                record_turn(self._store, order.run, Turn(host=self._token, reset=order.reset))
            self._waiting.append(order)
            self._driven[order.run_id] = asyncio.get_running_loop().create_future()
            return
        self._driven[order.run_id] = asyncio.get_running_loop().create_future()
        self._start(order)

    def _start(self, order: _Order, *, waited: bool = False) -> None:
        loop = asyncio.get_running_loop()

        def drive() -> None:
            stopped: BaseException | None = None
            try:
                if not order.resumed or self._leave_queue(order, waited):
                    self._drive(order)
            except BaseException as error:  # noqa: BLE001 - it is told to whoever waits
                _log.warning("workflow %s stopped: %s", order.run_id, error)
                stopped = error
            loop.call_soon_threadsafe(self._ended, order.run_id, stopped)

        threading.Thread(target=drive, name=f"driver of {order.run_id}", daemon=True).start()

    def _leave_queue(self, order: _Order, waited: bool) -> bool:
        """Whether it is still to be driven: somebody without a way to this cluster may have withdrawn it."""
        while True:
            try:
                wanted = not waited or read_turn(self._store, order.run) is not None
                clear_turn(self._store, order.run)
                return wanted
            except VerlWorkflowError as error:
                # Left there, it would seem to wait for its turn as long as this host lives.
                _log.warning("the turn of workflow %s cannot be taken away yet: %s", order.run_id, error)
                time.sleep(_AGAIN_S)

    def _drive(self, order: _Order) -> None:
        workflow = read_definition(self._store, order.run_id)["definition"]["workflow"]
        graph = read_graph(self._store, workflow["graph"], workflow["sha256"])
        owner = {**this_process(), "driver": self._token}
        launcher = self._launcher(order.caller, apart=order.reset is not None)
        Driver(self._store, order.run_id, graph, launcher, owner=owner, reset=order.reset).drive()

    def _launcher(self, caller: Caller, *, apart: bool) -> RayLauncher:
        if apart:
            # The job's own workers may have loaded the code that has changed.
            return RayLauncher(job=f"{caller.job}-{secrets.token_hex(4)}", runtime_env=caller.runtime_env)
        known = self._launchers.get(caller.job)
        if known is None:
            known = self._launchers[caller.job] = RayLauncher(job=caller.job, runtime_env=caller.runtime_env)
        return known

    def _ended(self, run_id: str, stopped: BaseException | None) -> None:
        self._driven.pop(run_id).set_result(stopped)
        running, _ = self._limits
        while self._waiting and (running < 0 or len(self._active()) < running):
            self._start(self._waiting.popleft(), waited=True)

    def _was_withdrawn(self, order: _Order) -> bool:
        """Whether somebody without a way to this cluster has taken it out of the queue."""
        try:
            return order.resumed and read_turn(self._store, order.run) is None
        except VerlWorkflowError:
            # Its driver will meet the storage's trouble, and tell of it.
            return False

    def _has_ended(self, run_id: str) -> bool:
        return read_run(self._store, run_id, progress=False).status in TERMINAL_STATES

    async def _has_recovered(self, run_id: str) -> None:
        """Wait until it is known whether this host has to take the workflow up; that of others may stay unknown."""
        await self._recovered
        while path_part(run_id) in self._unread:
            await asyncio.sleep(_AGAIN_S)

    async def _recover(self) -> None:
        """Take up what an earlier process of this host was driving or had in its queue."""
        import ray

        if not ray.get_runtime_context().was_current_actor_reconstructed:
            return
        while True:
            try:
                await self._take_up(await asyncio.to_thread(self._store.folders, "runs"))
                break
            except VerlWorkflowError as error:
                # Whoever asks this host for something waits for it.
                _log.warning("what was left behind cannot be listed yet: %s", error)
                await asyncio.sleep(_AGAIN_S)
        self._late = asyncio.ensure_future(self._recover_late())

    async def _recover_late(self) -> None:
        while self._unread:
            await asyncio.sleep(_AGAIN_S)
            await self._take_up(self._unread)

    async def _take_up(self, folders: Collection[str]) -> None:
        """Take up what was left behind in these folders; those that the storage does not give now are `_unread`."""
        unread: set[str] = set()
        for order in await asyncio.to_thread(self._left_behind, folders, unread):
            if order.run_id in self._driven:
                continue
            try:
                self._submit(order)
                self._taken_up.add(order.run_id)
            except VerlWorkflowError:
                unread.add(path_part(order.run_id))
        if unread - self._unread:
            _log.warning("the storage does not give all that was left behind: %s", sorted(unread))
        self._unread = unread

    def _left_behind(self, folders: Collection[str], unread: set[str]) -> list[_Order]:
        found: list[tuple[bool, float, _Order]] = []
        for state in list_runs(self._store, among=folders, unread=unread):
            waiting = state.status is RunStatus.PENDING and state.host == self._token
            mine = state.owner is not None and state.owner.get("driver") == self._token
            if waiting or (mine and state.status in {RunStatus.RUNNING, RunStatus.RESUMABLE}):
                try:
                    turn = read_turn(self._store, state.key)
                except VerlWorkflowError:
                    unread.add(path_part(state.run_id))
                    continue
                # Its job may be over: whatever its workers have loaded is not trusted.
                order = _Order(
                    run=state.key,
                    caller=Caller(job=self._token),
                    reset=turn.reset if turn is not None else None,
                    resumed=turn is not None,
                )
                found.append((waiting, state.created_at or time.time(), order))
        return [order for _, _, order in sorted(found, key=lambda each: each[:2])]


def _full() -> queue.Full:
    return queue.Full("Workflow queue has been full")


def _taken(run_id: str) -> RuntimeError:
    return RuntimeError(f"Workflow '{run_id}' is already running or pending.")
