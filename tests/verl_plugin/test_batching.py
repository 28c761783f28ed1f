"""Concurrent requests, abort and resume, with a decoder whose pace the test sets."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

import pytest

from verl_workflow.decoding import Decoded, DecodeRequest, StopReason
from verl_workflow.verl_plugin._batching import Batcher


def request(number: int) -> DecodeRequest:
    return DecodeRequest(prompt_ids=[number], max_tokens=1)


class Decoder:
    """Answers each prompt with itself; a batch lasts until `go` is set, or its abort is noticed."""

    def __init__(self) -> None:
        self.batches: list[list[int]] = []
        self.started = threading.Event()
        self.go = threading.Event()
        self.go.set()
        self.error: Exception | None = None

    def __call__(self, requests: Sequence[DecodeRequest], should_abort: Callable[[], bool]) -> list[Decoded]:
        self.batches.append([r.prompt_ids[0] for r in requests])
        self.started.set()
        reason = StopReason.EOS
        while not self.go.wait(0.005):
            if should_abort():
                reason = StopReason.ABORTED
                break
        if self.error:
            raise self.error
        return [Decoded(ids=list(r.prompt_ids), log_probs=[0.0], stop_reason=reason) for r in requests]

    async def wait_started(self) -> None:
        await asyncio.to_thread(self.started.wait, 30)


def in_loop(main: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(main, 60))


def batcher(decoder: Decoder, most: int = 100, window_s: float = 0.05) -> Batcher:
    return Batcher(decoder, most=most, window_s=window_s)


def test_concurrent_requests_share_a_batch_and_each_gets_its_own_answer() -> None:
    async def main() -> None:
        decoder = Decoder()
        out = await asyncio.gather(
            *(batch.generate(request(n)) for batch in [batcher(decoder, window_s=1)] for n in range(20))
        )
        assert [one.ids for one in out] == [[n] for n in range(20)]
        assert decoder.batches == [list(range(20))]

    in_loop(main())


def test_no_batch_is_larger_than_the_most() -> None:
    async def main() -> None:
        decoder = Decoder()
        batch = batcher(decoder, most=8, window_s=1)
        await asyncio.gather(*(batch.generate(request(n)) for n in range(24)))
        assert [len(b) for b in decoder.batches] == [8, 8, 8]

    in_loop(main())


def test_requests_that_come_during_a_batch_form_the_next() -> None:
    async def main() -> None:
        decoder = Decoder()
        decoder.go.clear()
        batch = batcher(decoder)
        first = asyncio.create_task(batch.generate(request(0)))
        await decoder.wait_started()
        rest = [asyncio.create_task(batch.generate(request(n))) for n in (1, 2, 3)]
        await asyncio.sleep(0)
        decoder.go.set()
        await asyncio.gather(first, *rest)
        assert decoder.batches == [[0], [1, 2, 3]]

    in_loop(main())


def test_an_error_reaches_every_request_of_its_batch_and_the_next_batch_works() -> None:
    async def main() -> None:
        decoder = Decoder()
        decoder.error = ValueError("broken")
        batch = batcher(decoder)
        out = await asyncio.gather(*(batch.generate(request(n)) for n in range(3)), return_exceptions=True)
        assert [str(error) for error in out] == ["broken"] * 3
        assert all(isinstance(error, ValueError) for error in out)
        decoder.error = None
        assert (await batch.generate(request(7))).ids == [7]
        await batch.drain()

    in_loop(main())


def test_a_request_given_up_does_not_harm_the_others() -> None:
    async def main() -> None:
        decoder = Decoder()
        decoder.go.clear()
        batch = batcher(decoder)
        tasks = [asyncio.create_task(batch.generate(request(n))) for n in range(3)]
        await decoder.wait_started()
        tasks[1].cancel()
        await asyncio.sleep(0)
        decoder.go.set()
        out = await asyncio.gather(*tasks, return_exceptions=True)
        assert isinstance(out[1], asyncio.CancelledError)
        assert [out[0].ids, out[2].ids] == [[0], [2]]  # type: ignore[union-attr]
        await batch.drain()

    in_loop(main())


def test_drain_waits_for_all_in_flight() -> None:
    async def main() -> None:
        decoder = Decoder()
        batch = batcher(decoder)
        await batch.drain()
        decoder.go.clear()
        task = asyncio.create_task(batch.generate(request(0)))
        await decoder.wait_started()
        drained = asyncio.create_task(batch.drain())
        await asyncio.sleep(0.05)
        assert not drained.done()
        decoder.go.set()
        await drained
        assert (await task).ids == [0]

    in_loop(main())


@pytest.mark.parametrize("reject", [False, True])
def test_abort_ends_what_runs_and_what_waits_and_holds_or_rejects_what_comes(reject: bool) -> None:
    async def main() -> None:
        decoder = Decoder()
        decoder.go.clear()
        batch = batcher(decoder, most=2)
        tasks = [asyncio.create_task(batch.generate(request(n))) for n in range(5)]
        await decoder.wait_started()
        assert await batch.abort(reject=reject) == 5
        out = await asyncio.gather(*tasks)
        assert [one.ids for one in out] == [[0], [1], [], [], []]
        assert {one.stop_reason for one in out} == {StopReason.ABORTED}
        assert decoder.batches == [[0, 1]]

        decoder.go.set()
        later = asyncio.create_task(batch.generate(request(9)))
        await asyncio.sleep(0.05)
        if reject:
            assert (await later).ids == []
        else:
            assert not later.done()
        batch.resume()
        assert (await later).ids == ([] if reject else [9])
        assert (await batch.generate(request(10))).stop_reason is StopReason.EOS

    in_loop(main())


def test_abort_with_nothing_in_flight_returns_at_once() -> None:
    async def main() -> None:
        assert await batcher(Decoder()).abort() == 0

    in_loop(main())
