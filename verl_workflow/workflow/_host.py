"""The actor that drives workflows: one for a storage and cluster, which outlives whoever started it.

It keeps nothing that is not in the storage too: when Ray rebuilds it on another node, it goes on with the workflows
that it was driving, and with those that were waiting for their turn.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from functools import partial
from typing import Any, TypeVar

from verl_workflow.errors import ErrorCode, UserError, VerlWorkflowError
from verl_workflow.storage import Store
from verl_workflow.workflow._client import Caller
from verl_workflow.workflow._definition import create_run, read_definition, run_key
from verl_workflow.workflow._driver import Driver
from verl_workflow.workflow._fold import FINAL_STATES, TERMINAL_STATES, RunStatus
from verl_workflow.workflow._host_life import HostLife
from verl_workflow.workflow._launch import RayLauncher
from verl_workflow.workflow._left_behind import left_behind
from verl_workflow.workflow._names import RunKey, path_part
from verl_workflow.workflow._outputs import Delivered, is_elsewhere, output_to_deliver
from verl_workflow.workflow._owner import is_rebuilt, this_process
from verl_workflow.workflow._packages import Packages
from verl_workflow.workflow._places import Order, Places, taken
from verl_workflow.workflow._records import StepsReset
from verl_workflow.workflow._state import read_graph, read_run
from verl_workflow.workflow._turn import Turn, clear_turn, end_turn, give_up, read_turn, record_turn

_T = TypeVar("_T")
_AGAIN_S = 1.0
_LEAVING_S = 10.0
_LAUNCHERS = 16
_log = logging.getLogger(__name__)


class WorkflowHost:
    """The actor's class.

    Args:
        token: of this host, the same when it is rebuilt. running, pending: how many workflows at a time; -1: any.
    """

    def __init__(self, store: Store, token: str, running: int, pending: int) -> None:
        self._store = store
        self._token = token
        self._places = Places(running, pending)
        self._taken_up: set[str] = set()
        # Folders of workflows of which the storage does not say yet whether they are to be taken up.
        self._unread: set[str] = set()
        self._doubtful: set[asyncio.Future[None]] = set()
        self._launchers: dict[str, RayLauncher] = {}
        self._packages = Packages(token)
        self._life = HostLife(store, token)
        self._life.start()
        self._recovered = asyncio.ensure_future(self._recover())

    async def hello(self, running: int | None, pending: int | None, durability: str | None = None) -> str:
        """The host's token. Raises ValueError when it was started with other limits."""
        mine = self._places.running, self._places.pending
        if any(theirs not in (None, limit) for limit, theirs in zip(mine, (running, pending), strict=True)):
            raise ValueError(
                "The workflow init is called again but the init options do not match the original ones. Original "
                f"options: max_running_workflows={mine[0]} max_pending_workflows={mine[1]}; "
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
    ) -> str:
        """Record a new workflow and drive it, now or when its turn has come.

        Both are done here, lest one be recorded that nobody drives when the caller dies in between.

        Args:
            run: the same when Ray makes this call again, as this process had died.
            caller: its job; steps of one job share no worker with another one's, whose modules may be older.
            seed: events to begin with.

        Returns:
            What `wait` and `output` know this wish by.

        Raises:
            RuntimeError: there is one of this id. queue.Full: too many are waiting; nothing was written.
        """
        await self._has_recovered(run.run_id)
        await self._forget_stale(run.run_id)
        begun = False
        if run.run_id in self._places or not self._places.has_room:
            # Made again by Ray, it was this very call that took the place.
            begun = await asyncio.to_thread(self._has_begun, run)
            if begun and run.run_id in self._places:
                return self._places.mark(run.run_id)
        mark = self._places.take(run.run_id, over=begun)
        order = Order(run=run, caller=caller)
        with self._given_back(order):
            if await asyncio.to_thread(self._record, order, definition, seed):
                self._place(order)
            else:
                self._leave(run.run_id)
        return mark

    async def submit(self, run_id: str, epoch: int, caller: Caller, reset: StepsReset | None = None) -> str:
        """Drive a recorded workflow, now or when its turn has come; returns as `begin`.

        Args:
            epoch: of the workflow when it was looked at.

        Raises:
            RuntimeError: it is driven here already, or has been since then. queue.Full: too many are waiting.
        """
        await self._has_recovered(run_id)
        if run_id in self._taken_up and run_id in self._places:
            # Ray makes the calls again that died with the process before; what this one asked for is under way.
            self._taken_up.discard(run_id)
            return self._places.mark(run_id)
        await self._forget_stale(run_id)
        await self._has_left(run_id)
        mark = self._places.take(run_id)
        with self._given_back(run_id):
            state = await asyncio.to_thread(read_run, self._store, run_id, progress=False)
            if state.epoch != epoch and state.status not in FINAL_STATES:
                # What is to be reset was found out before. But an end may be this very call's, made again by Ray.
                raise taken(run_id)
        # Said before it begins, so that nobody takes the workflow for one that has failed and is left so.
        turn = Turn(host=self._token, epoch=epoch, reset=reset, runtime_env=caller.runtime_env)
        order = Order(run=state.key, caller=caller, turn=turn)
        with self._given_back(order):
            await asyncio.to_thread(record_turn, self._store, order.run, turn)
            self._place(order)
        return mark

    async def wait(self, run_id: str, mark: str = "") -> BaseException | None:
        """Wait until a workflow is not driven here any more; gives what stopped its driver, None when it has ended.

        Args:
            mark: of the wish whose end is asked for.
        """
        await self._has_recovered(run_id)
        future = self._places.end(run_id, mark)
        return None if future is None else await asyncio.shield(future)

    async def output(self, run: RunKey, task_id: str | None, mark: str = "") -> Delivered:
        """The output of a workflow, driven here or elsewhere, once it is there. Raises as `get_output`."""
        await self._has_recovered(run.run_id)
        here = run.run_id in self._places
        stopped = await self.wait(run.run_id, mark) if task_id is None else None
        if stopped is not None and not is_elsewhere(stopped):
            raise stopped
        return await output_to_deliver(self._store, run, task_id, here=here)

    async def withdraw(self, run_id: str) -> bool:
        """Take a workflow out of the queue; False when it is being driven."""
        await self._has_recovered(run_id)
        for order in self._places.waiting(run_id):
            if await asyncio.to_thread(self._is_present, order):
                await asyncio.to_thread(clear_turn, self._store, order.run)
            if order in self._places.waiting(run_id):
                self._places.take_out(order)
        return run_id not in self._places

    async def _forget_stale(self, run_id: str) -> None:
        """Take out of the queue what others, without a way to this cluster, have withdrawn, ended or deleted."""
        for order in self._places.waiting(run_id):
            if not await asyncio.to_thread(self._is_present, order) and order in self._places.waiting(run_id):
                self._places.take_out(order)

    def _record(self, order: Order, definition: dict[str, Any], seed: Sequence[dict[str, Any]]) -> bool:
        """Record a new workflow; False when it was recorded before, by this very call, and has ended already."""
        run = order.run
        try:
            create_run(
                self._store,
                run.run_id,
                definition,
                incarnation=run.incarnation,
                host=self._token,
                seed=list(seed),
                runtime_env=dict(order.caller.runtime_env),
            )
        except UserError as error:
            if error.code is not ErrorCode.RUN_EXISTS:
                raise
            # By this call, whose answer was lost, or by it in a process before this one.
            if self._is_present(order):
                return True
            if not self._has_begun(run):
                raise taken(run.run_id) from error
            return False
        return True

    @contextlib.contextmanager
    def _given_back(self, order: Order | str) -> Iterator[None]:
        """Whatever goes wrong with what a place was taken for, the place is not lost."""
        try:
            yield
        except VerlWorkflowError as error:
            if error.retryable and isinstance(order, Order):
                self._settle(order)
            else:
                self._leave(order if isinstance(order, str) else order.run_id)
            raise
        except BaseException:
            self._leave(order if isinstance(order, str) else order.run_id)
            raise

    async def _has_left(self, run_id: str) -> None:
        """Wait for a driver that has written the end of its run, for all to see, and is about to leave its place."""
        future = self._places.end(run_id)
        if future is None:
            return
        state = await asyncio.to_thread(read_run, self._store, run_id, progress=False)
        if state.status in TERMINAL_STATES:
            await asyncio.wait([asyncio.shield(future)], timeout=_LEAVING_S)

    def _has_begun(self, run: RunKey) -> bool:
        """Whether the process before this one has recorded the workflow, which then was taken up already."""
        try:
            return run_key(self._store, run.run_id) == run
        except UserError:
            return False

    def _place(self, order: Order) -> None:
        if self._places.fill(order):
            self._start(order)

    def _leave(self, run_id: str, stopped: BaseException | None = None) -> None:
        for order in self._places.leave(run_id, stopped):
            self._start(order)

    def _start(self, order: Order) -> None:
        loop = asyncio.get_running_loop()

        def tell(stopped: BaseException) -> None:
            loop.call_soon_threadsafe(self._places.tell, order.run_id, stopped)

        def drive() -> None:
            stopped: BaseException | None = None
            try:
                with self._packages.kept(order.caller):
                    self._drive(order, tell)
            except BaseException as error:  # noqa: BLE001 - it is told to whoever waits
                _log.warning("workflow %s stopped: %s", order.run_id, error)
                stopped = error
            loop.call_soon_threadsafe(self._leave, order.run_id, stopped)

        threading.Thread(target=drive, name=f"driver of {order.run_id}", daemon=True).start()

    def _drive(self, order: Order, tell: Callable[[BaseException], None]) -> None:
        present = self._patiently(order, lambda: self._is_present(order))
        if not present:
            return
        try:
            self._patiently(order, lambda: self._driver(order)).drive()
        except Exception as error:
            # It does not wait for its turn any more, even if it was never claimed.
            leave = end_turn if is_elsewhere(error) else give_up
            try:
                # Whoever waits is told before a storage that is away has come back.
                self._patiently(order, lambda: leave(self._store, order.run, self._token), partial(tell, error))
            except VerlWorkflowError as problem:
                _log.warning("workflow %s is not given up: %s", order.run_id, problem)
            raise
        if order.turn is not None:
            self._patiently(order, lambda: end_turn(self._store, order.run, self._token))

    def _driver(self, order: Order) -> Driver:
        workflow = read_definition(self._store, order.run_id)["definition"]["workflow"]
        graph = read_graph(self._store, workflow["graph"], workflow["sha256"])
        owner = {**this_process(), "driver": self._token}
        reset = order.turn.reset if order.turn is not None else None
        launcher = self._launcher(order.caller, apart=reset is not None)
        return Driver(self._store, order.run_id, graph, launcher, owner=owner, run=order.run, reset=reset)

    def _patiently(self, order: Order, act: Callable[[], _T], meanwhile: Callable[[], None] | None = None) -> _T:
        """Do it, and again while the storage is away: given up, it would seem to wait as long as this host lives."""
        while True:
            try:
                return act()
            except VerlWorkflowError as error:
                if not error.retryable:
                    raise
                _log.warning("workflow %s has to wait for its storage: %s", order.run_id, error)
                if meanwhile is not None:
                    meanwhile()
                time.sleep(_AGAIN_S)

    def _launcher(self, caller: Caller, *, apart: bool) -> RayLauncher:
        if apart:
            # The job's own workers may have loaded the code that has changed.
            return RayLauncher(job=f"{caller.job}-{secrets.token_hex(4)}", runtime_env=caller.runtime_env)
        known = self._launchers.get(caller.key)
        if known is None:
            known = RayLauncher(job=caller.job, runtime_env=caller.runtime_env)
            # Whoever uses the oldest one keeps it.
            self._launchers = dict([*self._launchers.items(), (caller.key, known)][-_LAUNCHERS:])
        return known

    def _is_present(self, order: Order) -> bool:
        """Whether the workflow is still to be driven: it may have been withdrawn, ended or deleted from elsewhere."""
        try:
            state = read_run(self._store, order.run_id, progress=False)
        except UserError:
            return False
        if state.status is RunStatus.DAMAGED or state.key != order.run or state.status in FINAL_STATES:
            return False
        if order.turn is None:
            return state.status is not RunStatus.FAILED
        turn = read_turn(self._store, order.run)
        return turn is not None and (turn.host, turn.epoch) == (self._token, state.epoch)

    def _settle(self, order: Order) -> None:
        """The storage has failed in the middle of a begin, and may have kept what it was given: it is then driven."""

        async def settle() -> None:
            while True:
                try:
                    present = await asyncio.to_thread(self._is_present, order)
                    break
                except VerlWorkflowError as error:
                    if not error.retryable:
                        # Damaged: its place must not be held for ever.
                        present = False
                        break
                    await asyncio.sleep(_AGAIN_S)
            if present:
                self._place(order)
            else:
                self._leave(order.run_id)

        self._doubtful.add(task := asyncio.ensure_future(settle()))
        task.add_done_callback(self._doubtful.discard)

    async def _has_recovered(self, run_id: str) -> None:
        """Wait until it is known whether this host has to take the workflow up; that of others may stay unknown."""
        await self._recovered
        while path_part(run_id) in self._unread:
            await asyncio.sleep(_AGAIN_S)

    async def _recover(self) -> None:
        """Take up what an earlier process of this host was driving or had in its queue."""

        if not is_rebuilt():
            return
        await asyncio.to_thread(self._packages.end_left_ones)
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
        for order in await asyncio.to_thread(left_behind, self._store, self._token, folders, unread):
            if order.run_id not in self._places:
                self._places.take(order.run_id, over=True)
                self._place(order)
                self._taken_up.add(order.run_id)
        if unread - self._unread:
            _log.warning("the storage does not give all that was left behind: %s", sorted(unread))
        self._unread = unread
