"""Reward for short arithmetic answers."""

import re

_NUMBER = re.compile(r"-?\d+")


def score(data_source, solution_str, ground_truth, extra_info=None):
    """0.7 for the right last number, 0.3 more when the reply is a number and nothing else.

    The second part is what a small instruct model learns first, and it keeps replies short, so that they end in time.
    """
    numbers = _NUMBER.findall(solution_str.replace(",", ""))
    right = bool(numbers) and numbers[-1] == ground_truth
    bare = _NUMBER.fullmatch(solution_str.strip().removesuffix(".")) is not None
    return {"score": 0.7 * right + 0.3 * bare, "acc": float(right), "bare": float(bare)}
