"""The built-in model: two Qwen2 layers over bytes, the same bytes on every machine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

# Raised when what is written below changes, so that a folder made by an older version is not re-used.
RECIPE = "tiny-1"

CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_SPECIALS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
_CONTEXT = 512
_SEED = 20240
# Wider than usual, so that a model this narrow tells bytes apart from the first step on.
_SPREAD = 0.1
# Small, so that it starts out answering evenly at random: a policy that prefers a byte from the start hardly explores.
_OUTPUT_SPREAD = 0.02


def write_tiny(folder: Path) -> None:
    """Write model, tokenizer, chat template and generation config of the tiny model into `folder`."""
    import numpy as np
    import torch
    from transformers import GenerationConfig, Qwen2Config, Qwen2ForCausalLM

    tokenizer = _tokenizer()
    config = Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=_CONTEXT,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        initializer_range=_SPREAD,
        dtype=torch.float32,
    )
    model = Qwen2ForCausalLM(config)
    # RandomState's stream is frozen by NumPy's promise; torch's differs between CPUs with other vector units.
    stream = np.random.RandomState(_SEED)
    with torch.no_grad():
        for name, weight in sorted(model.named_parameters()):
            if weight.ndim > 1:
                spread = _OUTPUT_SPREAD if name.startswith("lm_head") else _SPREAD
                weight.copy_(torch.from_numpy(stream.normal(0.0, spread, tuple(weight.shape)).astype("float32")))
    model.generation_config = GenerationConfig(eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def _tokenizer() -> Any:
    """Byte-level BPE with no merges, which is a byte tokenizer.

    It is Qwen2-shaped because transformers loads a Qwen2Tokenizer for this model type, whatever its config says.
    """
    from tokenizers.pre_tokenizers import ByteLevel
    from transformers.models.qwen2.tokenization_qwen2 import Qwen2Tokenizer

    vocabulary = {token: index for index, token in enumerate([*_SPECIALS, *sorted(ByteLevel.alphabet())])}
    tokenizer = Qwen2Tokenizer(
        vocab=vocabulary,
        merges=[],
        pad_token="<|endoftext|>",
        eos_token="<|im_end|>",
        unk_token="<|endoftext|>",
        additional_special_tokens=["<|im_start|>"],
        model_max_length=_CONTEXT,
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer
