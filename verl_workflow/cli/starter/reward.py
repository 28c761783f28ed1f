"""The reward: how good an answer is, from 0 to 1."""

from typing import Any


def score(data_source: str, solution_str: str, ground_truth: str, extra_info: Any = None) -> dict[str, float]:
    """A fifth of it for answering in bits, the rest for the right ones; `acc` is reported beside the score.

    Partial credit matters: a model that starts out answering random bytes never meets a whole answer by chance.
    """
    if not solution_str:
        return {"score": 0.0, "acc": 0.0}
    bits = sum(character in "01" for character in solution_str) / len(solution_str)
    right = sum(character in ground_truth for character in solution_str) / len(solution_str)
    return {"score": 0.2 * bits + 0.8 * right, "acc": float(solution_str == ground_truth)}
