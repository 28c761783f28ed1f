"""Turns overlapping requests into batches: one decode at a time, of all that has gathered."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from verl_workflow.decoding import Decoded, DecodeRequest, StopReason

DecodeBatch = Callable[[Sequence[DecodeRequest], Callable[[], bool]], list[Decoded]]
"""Decodes a batch, asking the second argument now and then whether to stop."""


class Batcher:
    """Decodes concurrent requests together, in a thread beside the event loop.

    A batch starts once no request has come for `window_s` or `most` have gathered; requests that come during a batch
    form the next. All methods belong to one event loop.

    Args:
        decode_batch: does the work; what it raises goes to each request of its batch.
        most: the largest batch.
        window_s: how long to wait for one more request, in seconds.
    """

    def __init__(self, decode_batch: DecodeBatch, *, most: int, window_s: float) -> None:
        self._decode_batch = decode_batch
        self._most = most
        self._window_s = window_s
        self._waiting: asyncio.Queue[tuple[DecodeRequest, asyncio.Future[Decoded]]] = asyncio.Queue()
        self._open = asyncio.Event()
        self._open.set()
        self._idle = asyncio.Event()
        self._idle.set()
        self._in_flight = 0
        self._aborting = False
        self._rejecting = False
        self._task: asyncio.Task[None] | None = None

    async def generate(self, request: DecodeRequest) -> Decoded:
        """Decode one request. After `abort` it waits for `resume`, or comes back empty if requests are rejected."""
        while not self._open.is_set():
            if self._rejecting:
                return _nothing()
            await self._open.wait()
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._run())
        result: asyncio.Future[Decoded] = asyncio.get_running_loop().create_future()
        self._in_flight += 1
        self._idle.clear()
        try:
            self._waiting.put_nowait((request, result))
            return await result
        finally:
            self._in_flight -= 1
            if not self._in_flight:
                self._idle.set()

    async def drain(self) -> None:
        """Return when no request is in flight."""
        await self._idle.wait()

    async def abort(self, *, reject: bool = False) -> int:
        """End all requests in flight with what they have, and hold new ones until `resume`.

        Args:
            reject: answer new ones at once, with nothing, instead of holding them.

        Returns:
            how many requests were in flight.
        """
        count = self._in_flight
        self._rejecting = reject
        self._open.clear()
        self._aborting = True
        try:
            await self._idle.wait()
        finally:
            self._aborting = False
        return count

    def resume(self) -> None:
        """Take requests again."""
        self._rejecting = False
        self._open.set()

    async def _run(self) -> None:
        while True:
            batch = await self._gather()
            if self._aborting:
                outcome: list[Decoded] | BaseException = [_nothing() for _ in batch]
            else:
                work = asyncio.to_thread(self._decode_batch, [r for r, _ in batch], lambda: self._aborting)
                (outcome,) = await asyncio.gather(work, return_exceptions=True)
            for place, (_, result) in enumerate(batch):
                if result.done():  # its caller gave up
                    continue
                if isinstance(outcome, BaseException):
                    result.set_exception(outcome)
                else:
                    result.set_result(outcome[place])

    async def _gather(self) -> list[tuple[DecodeRequest, asyncio.Future[Decoded]]]:
        batch = [await self._waiting.get()]
        while len(batch) < self._most and not self._aborting:
            try:
                batch.append(await asyncio.wait_for(self._waiting.get(), self._window_s))
            except asyncio.TimeoutError:
                break
        return batch


def _nothing() -> Decoded:
    return Decoded(ids=[], log_probs=[], stop_reason=StopReason.ABORTED)
