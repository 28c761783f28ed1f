"""Which workflows a host drives, and which wait for a place, within its limits. Knows no storage; of one event loop."""

from __future__ import annotations

import asyncio
import collections
import queue
import secrets
from collections.abc import Iterator
from dataclasses import dataclass

from verl_workflow.workflow._client import Caller
from verl_workflow.workflow._names import RunKey
from verl_workflow.workflow._turn import Turn

_REMEMBERED = 10_000


@dataclass(frozen=True, kw_only=True)
class Order:
    """A workflow to be driven. Attributes: turn: recorded for it when it was taken up; None for a new one."""

    run: RunKey
    caller: Caller
    turn: Turn | None = None

    @property
    def run_id(self) -> str:
        return self.run.run_id


class Places:
    """One for each id that is being recorded, driven, or waits.

    Args:
        running, pending: how many workflows at a time; -1: any.
    """

    def __init__(self, running: int, pending: int) -> None:
        self.running, self.pending = running, pending
        self._ends: dict[str, asyncio.Future[BaseException | None]] = {}
        self._waiting: collections.deque[Order] = collections.deque()
        # Of places that are taken, and of those that were given back lately.
        self._marks: dict[str, str] = {}
        self._marked: dict[str, asyncio.Future[BaseException | None]] = {}

    def __contains__(self, run_id: str) -> bool:
        return run_id in self._ends

    @property
    def has_room(self) -> bool:
        return self.running < 0 or self.pending < 0 or len(self._ends) < self.running + self.pending

    def end(self, run_id: str, mark: str = "") -> asyncio.Future[BaseException | None] | None:
        """Done when the workflow is not driven here any more: with what has stopped it, None when it has ended.

        Args:
            mark: of the place that was taken for whoever asks; it may have been given back already.
        """
        return self._marked.get(mark) or self._ends.get(run_id)

    def mark(self, run_id: str) -> str:
        """What this place is known by for a while after it was given back."""
        return self._marks[run_id]

    def take(self, run_id: str, *, over: bool = False) -> str:
        """Take a place, to be filled by `fill` or given back by `leave`; returns its mark.

        Args:
            over: even if there is no room, for what is recorded already.

        Raises:
            RuntimeError: the id has a place. queue.Full: there is no room.
        """
        if run_id in self._ends:
            raise taken(run_id)
        if not over and not self.has_room:
            raise queue.Full("Workflow queue has been full")
        mark = self._marks[run_id] = secrets.token_hex(8)
        self._ends[run_id] = self._marked[mark] = asyncio.get_running_loop().create_future()
        if len(self._marked) > _REMEMBERED:
            del self._marked[next(iter(self._marked))]
        return mark

    def fill(self, order: Order) -> bool:
        """Whether the workflow, whose place was taken, can begin now; else it waits."""
        if 0 <= self.running < len(self._ends) - len(self._waiting):
            self._waiting.append(order)
            return False
        return True

    def leave(self, run_id: str, stopped: BaseException | None = None) -> list[Order]:
        """Give a place back; returns those that can begin now."""
        self.tell(run_id, stopped)
        del self._ends[run_id], self._marks[run_id]
        ready = []
        while self._waiting and (self.running < 0 or len(self._ends) - len(self._waiting) < self.running):
            ready.append(self._waiting.popleft())
        return ready

    def tell(self, run_id: str, stopped: BaseException | None) -> None:
        """Say what has stopped a workflow, which keeps its place."""
        if not self._ends[run_id].done():
            self._ends[run_id].set_result(stopped)

    def waiting(self, run_id: str) -> Iterator[Order]:
        """The order of this id, if it waits."""
        return (order for order in list(self._waiting) if order.run_id == run_id)

    def take_out(self, order: Order) -> None:
        """One that waits is not to be driven any more."""
        self._waiting.remove(order)
        self.tell(order.run_id, None)
        del self._ends[order.run_id], self._marks[order.run_id]


def taken(run_id: str) -> RuntimeError:
    """What whoever asks for an id is told that is running or pending."""
    return RuntimeError(f"Workflow '{run_id}' is already running or pending.")
