"""The reward: how good an answer is, from 0 to 1."""

from typing import Any


def score(data_source: str, solution_str: str, ground_truth: str, extra_info: Any = None) -> dict[str, float]:
    """Half of it for answering in digits, half for the right digit; `acc` is reported beside the score."""
    if not solution_str:
        return {"score": 0.0, "acc": 0.0}
    digits = sum(character.isdigit() for character in solution_str) / len(solution_str)
    right = sum(character == ground_truth for character in solution_str) / len(solution_str)
    return {"score": 0.5 * digits + 0.5 * right, "acc": right}
