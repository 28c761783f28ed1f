"""A tiny model with a byte tokenizer, made in place."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a random two-layer Qwen2, tied embeddings and two end-of-sequence ids."""
    import torch
    from tokenizers.pre_tokenizers import ByteLevel
    from transformers import Qwen2Config, Qwen2ForCausalLM
    from transformers.models.qwen2.tokenization_qwen2 import Qwen2Tokenizer

    folder = tmp_path_factory.mktemp("model")
    specials = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    vocabulary = {token: place for place, token in enumerate([*specials, *sorted(ByteLevel.alphabet())])}
    tokenizer = Qwen2Tokenizer(
        vocab=vocabulary,
        merges=[],
        pad_token="<|endoftext|>",
        eos_token="<|im_end|>",
        unk_token="<|endoftext|>",
        model_max_length=128,
    )
    tokenizer.save_pretrained(folder)
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=len(vocabulary),
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        initializer_range=0.4,
        tie_word_embeddings=True,
        eos_token_id=2,
        pad_token_id=0,
        bos_token_id=None,
    )
    model = Qwen2ForCausalLM(config)
    model.generation_config.eos_token_id = [2, 5]
    model.generation_config.pad_token_id = 0
    model.save_pretrained(folder)
    return folder
