"""Weights that come in parts, and those that do not fit."""

from __future__ import annotations

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from verl_workflow.errors import ErrorCode, VerlWorkflowError
from verl_workflow.verl_plugin._weights import WeightLoader


def build(seed: int, tied: bool = False) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=32,
            hidden_size=16,
            intermediate_size=24,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=2,
            tie_word_embeddings=tied,
        )
    ).eval()


def logits(model: LlamaForCausalLM) -> torch.Tensor:
    with torch.no_grad():
        return model(torch.tensor([[1, 2, 3]])).logits


@pytest.mark.parametrize("tied", [False, True])
def test_a_whole_state_in_parts_makes_the_models_equal(tied: bool) -> None:
    source, target = build(1, tied), build(2, tied)
    items = list(source.state_dict().items())
    loader = WeightLoader(target)
    for _ in range(2):
        loader.load(items[:3])
        loader.load(items[3:])
        loader.finish()
    assert torch.equal(logits(source), logits(target))


@pytest.mark.parametrize("left_out", ["lm_head.weight", "model.embed_tokens.weight"])
def test_tied_weights_may_come_under_either_name(left_out: str) -> None:
    source, target = build(1, tied=True), build(2, tied=True)
    loader = WeightLoader(target)
    loader.load((name, value) for name, value in source.state_dict().items() if name != left_out)
    loader.finish()
    assert torch.equal(logits(source), logits(target))


def test_weights_of_another_precision_are_converted() -> None:
    source, target = build(1), build(2)
    loader = WeightLoader(target)
    loader.load((name, value.bfloat16()) for name, value in source.state_dict().items())
    loader.finish()
    assert target.lm_head.weight.dtype == torch.float32
    assert torch.equal(target.lm_head.weight, source.lm_head.weight.bfloat16().float())


def test_a_missing_weight_is_named_and_the_next_transfer_starts_anew() -> None:
    source = build(1)
    loader = WeightLoader(build(2))
    items = dict(source.state_dict())
    norm = items.pop("model.norm.weight")
    loader.load(items.items())
    with pytest.raises(VerlWorkflowError, match=r"model\.norm\.weight") as caught:
        loader.finish()
    assert caught.value.code is ErrorCode.MODEL_INVALID
    loader.load([("model.norm.weight", norm)])
    with pytest.raises(VerlWorkflowError, match="20 weights were not sent"):
        loader.finish()


def test_an_unexpected_weight_is_named() -> None:
    loader = WeightLoader(build(1))
    with pytest.raises(VerlWorkflowError, match=r"unexpected weight.*model\.extra") as caught:
        loader.load([("model.extra", torch.zeros(1))])
    assert caught.value.code is ErrorCode.MODEL_INVALID


def test_a_weight_of_another_shape_is_not_stretched_to_fit() -> None:
    target = build(1)
    before = target.model.norm.weight.clone()
    with pytest.raises(VerlWorkflowError, match=r"model.norm.weight: \(1,\) for \(16,\)"):
        WeightLoader(target).load([("model.norm.weight", torch.zeros(1))])
    assert torch.equal(target.model.norm.weight, before)
