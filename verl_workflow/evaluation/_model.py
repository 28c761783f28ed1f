"""A model folder, loaded to answer greedily."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from verl_workflow.decoding import Decoded, DecodeRequest, decode
from verl_workflow.errors import ErrorCode, UserError
from verl_workflow.models import check_folder

# More threads slow a model on the CPU down, and one below this size would wait for them more than it computes.
_MOST_THREADS = 16
_ONE_THREAD_BELOW = 5_000_000


@dataclass(frozen=True, kw_only=True)
class GreedyModel:
    """A causal language model and its tokenizer: bfloat16 on CUDA when the process sees a GPU, else float32 on the CPU.

    The same folder, prompts and batches give the same answers on the same machine.
    """

    model: Any
    tokenizer: Any
    eos_ids: frozenset[int]
    pad_id: int

    @classmethod
    def load(cls, folder: Path) -> GreedyModel:
        """Load what lies in `folder`; nothing is fetched from anywhere.

        Raises:
            UserError(MODEL_INVALID): a part is missing or damaged, or transformers cannot load it.
        """
        import torch
        from transformers import AutoModelForCausalLM, AutoTokenizer

        check_folder(folder)
        cuda = torch.cuda.is_available()
        try:
            tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
            model = AutoModelForCausalLM.from_pretrained(
                folder, dtype=torch.bfloat16 if cuda else torch.float32, local_files_only=True
            )
        except MemoryError:
            raise
        # What a damaged folder raises depends on where transformers or a model's own code stumbles over it.
        except Exception as error:
            raise UserError(
                ErrorCode.MODEL_INVALID,
                f"transformers cannot load the model: {type(error).__name__}: {error}",
                where=str(folder),
                remedy="Check the folder with AutoModelForCausalLM.from_pretrained, or export the model again.",
            ) from error
        model = model.to("cuda" if cuda else "cpu").eval()
        ends, pad = _special_ids(tokenizer, model.generation_config)
        return cls(model=model, tokenizer=tokenizer, eos_ids=ends, pad_id=pad)

    def render(self, chat: Sequence[Mapping[str, str]]) -> str:
        """The chat as the text the model continues."""
        return str(self.tokenizer.apply_chat_template(list(chat), add_generation_prompt=True, tokenize=False))

    def encode(self, text: str) -> list[int]:
        """Token ids of a rendered chat; the template has put the special tokens in already."""
        return [int(token) for token in self.tokenizer(text, add_special_tokens=False)["input_ids"]]

    def answer(self, prompts: Sequence[Sequence[int]], max_tokens: int) -> list[Decoded]:
        """Continue all prompts as one batch, up to `max_tokens` each."""
        requests = [DecodeRequest(prompt_ids=ids, max_tokens=max_tokens, temperature=0.0) for ids in prompts]
        with _threads(self.model):
            return decode(self.model, requests, eos_ids=self.eos_ids, pad_id=self.pad_id)

    def text(self, ids: Sequence[int]) -> str:
        """What was produced, as a reward sees it: without special tokens."""
        return str(self.tokenizer.decode(list(ids), skip_special_tokens=True))


@contextmanager
def _threads(model: Any) -> Iterator[None]:
    """The machine's cores for a model on the CPU: Ray gives a worker that reserves no core a single thread."""
    import torch

    before = torch.get_num_threads()
    small = sum(weight.numel() for weight in model.parameters()) < _ONE_THREAD_BELOW
    torch.set_num_threads(1 if small else min(_MOST_THREADS, len(os.sched_getaffinity(0))))
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _special_ids(tokenizer: Any, generation: Any) -> tuple[frozenset[int], int]:
    """The ids that end an answer, by tokenizer and generation config, and one to pad with."""
    named = getattr(generation, "eos_token_id", None)
    ends = {tokenizer.eos_token_id, *(named if isinstance(named, (list, tuple)) else [named])}
    pad = tokenizer.pad_token_id
    return frozenset(int(end) for end in ends if end is not None), 0 if pad is None else int(pad)
