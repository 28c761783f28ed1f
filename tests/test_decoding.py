"""Decoding against transformers' own `generate` and against full forward passes."""

from __future__ import annotations

import pickle
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
)

from verl_workflow.decoding import Decoded, DecodeRequest, StopReason, decode
from verl_workflow.errors import ErrorCode, UserError, VerlWorkflowError

VOCAB = 61
PAD = 0
EOS = 60
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    # Far from uniform, so that greedy choices are clear and filters have something to cut.
    "initializer_range": 0.4,
    "pad_token_id": PAD,
    "eos_token_id": EOS,
}
RAGGED = [[5, 6, 7], [9], [3, 4, 5, 6, 7, 8, 9, 10, 11], [5, 6, 7], [40, 2]]


def build(kind: str = "qwen2") -> PreTrainedModel:
    torch.manual_seed(3)
    if kind == "qwen2":
        return Qwen2ForCausalLM(Qwen2Config(**SIZES)).eval()
    if kind == "tied":
        return LlamaForCausalLM(LlamaConfig(**SIZES, tie_word_embeddings=True)).eval()
    if kind == "sliding":
        return MistralForCausalLM(MistralConfig(**SIZES, sliding_window=4)).eval()
    assert kind == "gpt2"
    config = GPT2Config(vocab_size=VOCAB, n_embd=32, n_layer=2, n_head=4, n_positions=128, eos_token_id=EOS)
    config.initializer_range = 0.4
    return GPT2LMHeadModel(config).eval()


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return build()


def run(model: Any, requests: Sequence[DecodeRequest], seed: int = 0, **options: Any) -> list[Decoded]:
    options = {"eos_ids": [EOS], "pad_id": PAD, **options}
    return decode(model, requests, generator=torch.Generator().manual_seed(seed), **options)


def greedy(prompt: Sequence[int], max_tokens: int = 12, **more: Any) -> DecodeRequest:
    return DecodeRequest(prompt_ids=prompt, max_tokens=max_tokens, temperature=0, **more)


def forward(model: Any, prompt: Sequence[int], ids: Sequence[int]) -> torch.Tensor:
    """The logits before each of `ids`, from one pass over the whole sequence."""
    with torch.no_grad():
        logits = model(torch.tensor([[*prompt, *ids]])).logits[0].double()
    return logits[len(prompt) - 1 : len(prompt) + len(ids) - 1]


def kept(logits: torch.Tensor, top_k: int, top_p: float) -> list[int]:
    """The tokens that both filters leave, by the definition and token after token."""
    order = sorted(range(len(logits)), key=lambda i: -float(logits[i]))
    if top_k > 0:
        order = [i for i in order if logits[i] >= logits[order[min(top_k, len(order)) - 1]]]
    probs = torch.softmax(logits[order], -1).tolist()
    total, left = 0.0, []
    for token, prob in zip(order, probs, strict=True):
        if left and total >= top_p and top_p < 1:
            break
        left.append(token)
        total += prob
    return left


@pytest.mark.parametrize("kind", ["qwen2", "tied", "sliding", "gpt2"])
def test_greedy_decoding_of_ragged_prompts_equals_generate(kind: str) -> None:
    model = build(kind)
    out = run(model, [greedy(prompt) for prompt in RAGGED])
    for prompt, one in zip(RAGGED, out, strict=True):
        ids = torch.tensor([prompt])
        expected = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=12,
            do_sample=False,
            eos_token_id=EOS,
            pad_token_id=PAD,
        )[0, len(prompt) :].tolist()
        assert one.ids == expected


@pytest.mark.parametrize("kind", ["qwen2", "tied", "sliding", "gpt2"])
@pytest.mark.parametrize("temperature", [0.0, 1.0, 0.7])
def test_log_probs_are_those_of_a_full_forward_pass(kind: str, temperature: float) -> None:
    model = build(kind)
    requests = [DecodeRequest(prompt_ids=p, max_tokens=16, temperature=temperature) for p in RAGGED]
    for prompt, one in zip(RAGGED, run(model, requests), strict=True):
        logits = forward(model, prompt, one.ids) / (temperature or 1.0)
        expected = logits.log_softmax(-1).gather(1, torch.tensor(one.ids).unsqueeze(1)).squeeze(1)
        assert len(one.log_probs) == len(one.ids)
        assert torch.tensor(one.log_probs).double().sub(expected).abs().max() < 1e-4


@settings(max_examples=40, deadline=None)
@given(
    top_k=st.integers(-1, VOCAB + 5),
    top_p=st.floats(0.01, 1.0),
    temperature=st.floats(0.3, 3.0),
    seed=st.integers(0, 2**31),
)
def test_sampling_stays_within_top_k_and_top_p_and_reports_the_filtered_distribution(
    model: PreTrainedModel, top_k: int, top_p: float, temperature: float, seed: int
) -> None:
    # A second, unfiltered and a third, greedy row: filters are per row.
    filtered = DecodeRequest(
        prompt_ids=[5, 6, 7], max_tokens=5, temperature=temperature, top_k=top_k, top_p=top_p, ignore_eos=True
    )
    free = DecodeRequest(prompt_ids=[9], max_tokens=5, ignore_eos=True)
    out = run(model, [filtered, free, greedy([5, 6, 7], 5, ignore_eos=True, top_k=3, top_p=0.2)], seed)
    for request, one in zip([filtered, free], out, strict=False):
        logits = forward(model, request.prompt_ids, one.ids) / request.temperature
        for token, log_prob, row in zip(one.ids, one.log_probs, logits, strict=True):
            left = kept(row, request.top_k, request.top_p)
            loose = kept(row, request.top_k, min(1.0, request.top_p + 1e-5))  # rounding at the very edge
            assert token in loose
            expected = row[left].log_softmax(-1)[left.index(token)] if token in left else None
            if expected is not None and left == loose:
                assert abs(float(expected) - log_prob) < 1e-4
    assert out[2].ids == run(model, [greedy([5, 6, 7], 5, ignore_eos=True)])[0].ids


def test_samples_follow_the_model(model: PreTrainedModel) -> None:
    count = 4000
    out = run(model, [DecodeRequest(prompt_ids=[5, 6], max_tokens=1)] * count, seed=1)
    seen = torch.bincount(torch.tensor([one.ids[0] for one in out]), minlength=VOCAB) / count
    expected = forward(model, [5, 6], [1])[0].softmax(-1)
    # Five standard deviations of the rarest to the commonest token.
    assert ((seen - expected).abs() < 5 * (expected * (1 - expected) / count).sqrt() + 1e-3).all()


def test_top_k_of_one_is_greedy_with_certainty(model: PreTrainedModel) -> None:
    request = DecodeRequest(prompt_ids=[5, 6, 7], max_tokens=8, top_k=1)
    (one,) = run(model, [request])
    assert one.ids == run(model, [greedy([5, 6, 7], 8)])[0].ids
    assert one.log_probs == [0.0] * len(one.ids)


def test_each_row_has_its_own_limit(model: PreTrainedModel) -> None:
    limits = [1, 9, 3, 6]
    out = run(model, [greedy([5, 6, 7], limit, ignore_eos=True) for limit in limits])
    assert [len(one.ids) for one in out] == limits
    assert {one.stop_reason for one in out} == {StopReason.LENGTH}
    longest = out[1]
    assert all(one.ids == longest.ids[: len(one.ids)] for one in out)
    for one in out:
        assert one.log_probs == pytest.approx(longest.log_probs[: len(one.ids)], abs=1e-4)


def test_any_of_several_eos_ids_ends_a_row_and_is_its_last_id(model: PreTrainedModel) -> None:
    whole = [one.ids for one in run(model, [greedy(p, 10) for p in RAGGED], eos_ids=[])]
    eos = {whole[0][4], whole[2][2]}
    out = run(model, [greedy(p, 10) for p in RAGGED], eos_ids=eos)
    for ids, one in zip(whole, out, strict=True):
        hits = [place for place, token in enumerate(ids) if token in eos]
        if hits:
            assert one.ids == ids[: hits[0] + 1]
            assert one.stop_reason is StopReason.EOS
        else:
            assert one.ids == ids
            assert one.stop_reason is StopReason.LENGTH
    assert {one.stop_reason for one in out} == {StopReason.EOS, StopReason.LENGTH}


def test_an_ignored_eos_does_not_end_a_row(model: PreTrainedModel) -> None:
    (whole,) = run(model, [greedy([9], 10)], eos_ids=[])
    requests = [greedy([9], 10, ignore_eos=True), greedy([9], 10)]
    going_on, ending = run(model, requests, eos_ids=[whole.ids[2]])
    assert going_on.ids == whole.ids
    assert going_on.stop_reason is StopReason.LENGTH
    assert ending.ids == whole.ids[: whole.ids.index(whole.ids[2]) + 1]


def test_an_eos_at_the_limit_counts_as_eos(model: PreTrainedModel) -> None:
    (whole,) = run(model, [greedy([9], 1)], eos_ids=[])
    (one,) = run(model, [greedy([9], 1)], eos_ids=whole.ids)
    assert one.stop_reason is StopReason.EOS


def test_rows_that_end_early_do_not_change_the_others(model: PreTrainedModel) -> None:
    alone = run(model, [greedy([5, 6, 7], 20, ignore_eos=True)])[0]
    crowd = [greedy(p, 1 + n, ignore_eos=True) for n, p in enumerate(RAGGED)]
    together = run(model, [*crowd, greedy([5, 6, 7], 20, ignore_eos=True)])
    assert together[-1].ids == alone.ids
    assert together[-1].log_probs == pytest.approx(alone.log_probs, abs=1e-4)


def test_equal_prompts_are_read_once_and_finished_rows_leave_the_batch(
    model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = []
    original = model.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        sizes.append(kwargs["input_ids"].size(0))
        return original(*args, **kwargs)

    forward.__signature__ = __import__("inspect").signature(original)  # type: ignore[attr-defined]
    monkeypatch.setattr(model, "forward", forward)
    requests = [greedy([5, 6], 2, ignore_eos=True)] * 6 + [greedy([7], 5, ignore_eos=True)] * 2
    out = run(model, requests)
    assert [len(one.ids) for one in out] == [2] * 6 + [5] * 2
    assert sizes == [2, 8, 2, 2, 2]


def test_an_abort_returns_what_was_produced(model: PreTrainedModel) -> None:
    whole = run(model, [greedy(p, 10, ignore_eos=True) for p in RAGGED])
    asked = []

    def abort() -> bool:
        asked.append(1)
        return len(asked) == 4

    limits = [10, 2, 10, 10, 10]
    requests = [greedy(p, n, ignore_eos=True) for p, n in zip(RAGGED, limits, strict=True)]
    out = run(model, requests, should_abort=abort)
    assert [one.stop_reason for one in out] == [StopReason.LENGTH if n == 2 else StopReason.ABORTED for n in limits]
    assert [one.ids for one in out] == [w.ids[: min(n, 4)] for w, n in zip(whole, limits, strict=True)]


def test_an_answer_with_a_seed_does_not_depend_on_what_is_decoded_with_it(model: PreTrainedModel) -> None:
    mine = DecodeRequest(prompt_ids=[5, 6, 7], max_tokens=12, seed=11)
    others = [
        DecodeRequest(prompt_ids=[9, 10, 11, 12, 13], max_tokens=3, temperature=0.7),
        greedy([4], 20, ignore_eos=True),
        DecodeRequest(prompt_ids=[5, 6, 7], max_tokens=12, seed=12),
    ]
    [alone] = run(model, [mine])
    for seed in (1, 2):
        _, _, other, beside = run(model, [*others, mine], seed=seed)
        assert beside.ids == alone.ids
        assert other.ids != alone.ids


def test_answers_with_seeds_are_distributed_as_the_model_says(model: PreTrainedModel) -> None:
    prompt, count = [5, 6], 4000
    seeded = [DecodeRequest(prompt_ids=prompt, max_tokens=1, seed=seed) for seed in range(count)]
    logits = model(torch.tensor([prompt])).logits[0, -1].softmax(-1)
    found = torch.bincount(torch.tensor([one.ids[0] for one in run(model, seeded)]), minlength=len(logits)) / count
    assert (found - logits).abs().max() < 4 * (0.25 / count) ** 0.5


def test_the_same_generator_state_gives_the_same_samples(model: PreTrainedModel) -> None:
    requests = [DecodeRequest(prompt_ids=p, max_tokens=8) for p in RAGGED * 2]
    assert run(model, requests, seed=5) == run(model, requests, seed=5)
    assert run(model, requests, seed=5) != run(model, requests, seed=6)


def test_no_requests_give_no_results(model: PreTrainedModel) -> None:
    assert run(model, []) == []


def test_logits_that_are_not_numbers_are_an_error() -> None:
    model = build()
    with torch.no_grad():
        model.get_output_embeddings().weight[7] = float("nan")
    for request in (greedy([5]), DecodeRequest(prompt_ids=[5], max_tokens=3)):
        with pytest.raises(VerlWorkflowError) as caught:
            run(model, [request])
        assert caught.value.code is ErrorCode.MODEL_INVALID


@pytest.mark.parametrize(
    "bad",
    [
        {"prompt_ids": []},
        {"max_tokens": 0},
        {"temperature": -0.1},
        {"temperature": float("nan")},
        {"temperature": float("inf")},
        {"top_p": 0.0},
        {"top_p": 1.01},
        {"top_p": float("nan")},
    ],
)
def test_a_request_out_of_range_is_refused(bad: dict[str, Any]) -> None:
    with pytest.raises(UserError) as caught:
        DecodeRequest(**{"prompt_ids": [1], "max_tokens": 1, **bad})
    assert caught.value.code is ErrorCode.DATA_INVALID
    assert next(iter(bad)) in str(caught.value)


def test_requests_and_results_can_be_sent_to_another_process(model: PreTrainedModel) -> None:
    request = greedy([1, 2], 3)
    assert pickle.loads(pickle.dumps(request)) == request
    out = run(model, [request])
    assert pickle.loads(pickle.dumps(out)) == out


def test_importing_the_module_imports_neither_torch_nor_verl() -> None:
    code = (
        "import sys, verl_workflow.decoding; print(sorted({'torch', 'verl', 'ray', 'transformers'} & set(sys.modules)))"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "[]"
