"""The rollout server, called as verl calls it but in this process."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Qwen2ForCausalLM
from verl.workers.config import HFModelConfig, RolloutConfig

from verl_workflow.errors import ErrorCode, UserError, VerlWorkflowError
from verl_workflow.verl_plugin._options import Options
from verl_workflow.verl_plugin._rollout import _parts
from verl_workflow.verl_plugin._server import HFServer

GREEDY = {"temperature": 0.0, "top_p": 1.0, "top_k": -1, "logprobs": True, "repetition_penalty": 1.0}


def serve(folder: Path, use: Callable[[HFServer], Awaitable[Any]], load_format: str = "auto", **options: Any) -> Any:
    async def main() -> Any:
        config = RolloutConfig(
            name="hf",
            dtype="float32",
            prompt_length=16,
            response_length=8,
            load_format=load_format,
            engine_kwargs={"hf": options},
        )
        model = HFModelConfig(path=str(folder), override_config={"attn_implementation": "sdpa"})
        server = HFServer(config, model, replica_rank=0)
        await server.launch_server()
        return await use(server)

    return asyncio.run(asyncio.wait_for(main(), 120))


def expected(folder: Path, prompt: list[int], **options: Any) -> list[int]:
    model = Qwen2ForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    ids = torch.tensor([prompt])
    out = model.generate(
        ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=8, pad_token_id=0, **options
    )
    return out[0, len(prompt) :].tolist()


def test_concurrent_calls_are_decoded_as_one_batch_and_equal_generate(tiny_model: Path) -> None:
    prompts = [[10, 11, 12], [40], list(range(20, 33)), [10, 11, 12]]
    sizes: list[int] = []

    async def use(server: HFServer) -> Any:
        original = server._batcher._decode_batch
        server._batcher._decode_batch = lambda batch, abort: (sizes.append(len(batch)), original(batch, abort))[1]
        return await asyncio.gather(
            *(server.generate(prompt, GREEDY, request_id=str(n)) for n, prompt in enumerate(prompts))
        )

    out = serve(tiny_model, use, batch_window_s=0.5)
    assert sizes == [4]
    for prompt, one in zip(prompts, out, strict=True):
        assert one.token_ids == expected(tiny_model, prompt)  # with both of the generation config's eos ids
        assert one.stop_reason == "completed"
        assert len(one.log_probs) == len(one.token_ids)


def test_the_limit_comes_from_the_call_or_from_the_room_that_is_left(tiny_model: Path) -> None:
    async def use(server: HFServer) -> list[int]:
        lengths = []
        for prompt, more in [
            ([10], {}),
            ([10], {"max_tokens": 3}),
            ([10], {"max_new_tokens": 2}),
            ([10], {"max_tokens": 0}),
            ([10] * 20, {}),
            ([10] * 40, {}),
        ]:
            params = {"temperature": 1.0, "ignore_eos": True, **more}
            lengths.append(len((await server.generate(prompt, params, request_id="x")).token_ids))
        return lengths

    assert serve(tiny_model, use) == [8, 3, 2, 1, 4, 1]


def test_log_probs_are_given_only_when_asked_for_and_the_weights_version_always(tiny_model: Path) -> None:
    async def use(server: HFServer) -> Any:
        await server.set_global_steps(3)
        return await server.generate([10], {"temperature": 1.0}, request_id="x")

    out = serve(tiny_model, use)
    assert out.log_probs is None
    assert out.extra_fields == {"global_steps": 3}


def test_sampling_at_a_step_does_not_depend_on_what_came_before(tiny_model: Path) -> None:
    async def use(server: HFServer) -> Any:
        params = {"temperature": 1.0, "ignore_eos": True}
        outs = []
        for step in (4, 5, 4):
            await server.set_global_steps(step)
            outs.append((await server.generate([10], params, request_id="x")).token_ids)
            await server.generate([11], params, request_id="y")
        return outs

    first, other, again = serve(tiny_model, use)
    assert first == again != other


def test_weights_sent_to_a_dummy_server_make_it_the_model(tiny_model: Path) -> None:
    state = Qwen2ForCausalLM.from_pretrained(tiny_model, dtype=torch.float32).state_dict()

    async def weights() -> Any:
        for item in state.items():
            yield item

    async def use(server: HFServer) -> Any:
        before = await server.generate([10, 11], GREEDY, request_id="x")
        parts = 0
        async for part, last in _parts(weights(), size=8 << 10):
            parts += 1
            await server.load_weights(dict(part), last)
        return before.token_ids, (await server.generate([10, 11], GREEDY, request_id="y")).token_ids, parts

    before, after, parts = serve(tiny_model, use, load_format="dummy")
    assert parts > 2
    assert after == expected(tiny_model, [10, 11])
    assert before != after


def test_missing_and_unexpected_weights_are_errors(tiny_model: Path) -> None:
    async def use(server: HFServer) -> None:
        state = dict(server.model.state_dict())
        with pytest.raises(VerlWorkflowError, match="unexpected") as caught:
            await server.load_weights({"nonsense": torch.zeros(1)}, last=False)
        assert caught.value.code is ErrorCode.MODEL_INVALID
        state.pop("model.norm.weight")
        with pytest.raises(VerlWorkflowError, match=r"model\.norm\.weight"):
            await server.load_weights(state, last=True)

    serve(tiny_model, use)


def test_aborted_requests_come_back_as_aborted_and_generation_resumes(tiny_model: Path) -> None:
    async def use(server: HFServer) -> None:
        task = asyncio.create_task(server.generate([10], GREEDY, request_id="x"))
        await asyncio.sleep(0)
        assert await server.abort_all_requests(reject_request=True) == {"aborted_count": 1, "request_ids": []}
        assert (await task).stop_reason == "aborted"
        assert (await server.generate([10], GREEDY, request_id="y")).stop_reason == "aborted"
        await server.resume_generation()
        assert (await server.generate([10], GREEDY, request_id="z")).stop_reason == "completed"
        await server.sleep()

    serve(tiny_model, use, batch_window_s=0.2)


@pytest.mark.parametrize(("params", "more"), [({"repetition_penalty": 1.2}, {}), ({}, {"image_data": ["picture"]})])
def test_what_it_cannot_do_is_refused_and_not_ignored(
    tiny_model: Path, params: dict[str, Any], more: dict[str, Any]
) -> None:
    async def use(server: HFServer) -> None:
        with pytest.raises(UserError) as caught:
            await server.generate([10], {"temperature": 1.0, **params}, request_id="x", **more)
        assert caught.value.code is ErrorCode.OVERRIDE_INVALID

    serve(tiny_model, use)


@pytest.mark.parametrize("bad", [{"batch_windows": 1}, {"batch_window_s": -1}, {"weights": "pigeon"}])
def test_an_unknown_or_wrong_setting_names_its_place(bad: dict[str, Any]) -> None:
    with pytest.raises(UserError) as caught:
        Options.of(RolloutConfig(name="hf", engine_kwargs={"hf": bad}))
    assert f"engine_kwargs.hf.{next(iter(bad))}" in str(caught.value)
    assert "batch_window_s, weights" in str(caught.value)


def test_parts_keep_order_lose_nothing_and_only_the_last_says_so() -> None:
    items = [(str(n), torch.zeros(n + 1)) for n in range(10)]

    async def stream() -> Any:
        for item in items:
            yield item

    async def collect(size: int) -> list[Any]:
        return [one async for one in _parts(stream(), size)]

    for size in (1, 40, 1 << 20):
        parts = asyncio.run(collect(size))
        assert [name for part, _ in parts for name, _ in part] == [name for name, _ in items]
        assert [last for _, last in parts] == [False] * (len(parts) - 1) + [True]
    assert len(asyncio.run(collect(1))) == 10
