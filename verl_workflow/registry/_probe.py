"""Whether a copied model loads and answers as its source does."""

from __future__ import annotations

from pathlib import Path

from verl_workflow.errors import ErrorCode, VerlWorkflowError

_QUESTIONS = ("What is 2 + 3?", "Write one short sentence about the sea.", "1, 1, 2, 3, 5,")
_TOKENS = 8


def check_copy(source: Path, copy: Path) -> None:
    """Raise unless both folders load and give the same greedy answers to a few fixed questions.

    Raises:
        UserError(MODEL_INVALID): config, weights, tokenizer or chat template are missing or cannot be loaded.
        VerlWorkflowError(MODEL_INVALID): the answers differ.
    """
    expected, found = _answers(source), _answers(copy)
    if expected != found:
        raise VerlWorkflowError(
            ErrorCode.MODEL_INVALID,
            "the copied model answers differently from its source",
            where=str(source),
            value=found,
            remedy="Check the disk, and that nothing writes to the source while it is promoted.",
            retryable=True,
        )


def _answers(folder: Path) -> list[list[int]]:
    from verl_workflow.evaluation import GreedyModel

    model = GreedyModel.load(folder)
    prompts = [model.encode(model.render([{"role": "user", "content": question}])) for question in _QUESTIONS]
    return [decoded.ids for decoded in model.answer(prompts, _TOKENS)]
