"""Reward for short arithmetic answers."""

import re

_NUMBER = re.compile(r"-?\d+")


def score(data_source, solution_str, ground_truth, extra_info=None):
    """1 when the last number of the reply is the right one, else 0."""
    numbers = _NUMBER.findall(solution_str.replace(",", ""))
    right = float(bool(numbers) and numbers[-1] == ground_truth)
    return {"score": right, "acc": right}
