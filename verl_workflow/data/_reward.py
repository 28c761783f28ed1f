"""One call of the reward on one row, before anything is trained: it finds most mistakes in a second."""

from __future__ import annotations

import inspect
import math
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from verl_workflow.errors import ErrorCode, UserError

if TYPE_CHECKING:
    from verl_workflow.spec import Reward


def try_reward(reward: Reward, code_dir: Path, row: Mapping[str, Any]) -> None:
    """Call the reward with the right answer as the reply.

    Args:
        row: in verl's schema.

    Raises:
        UserError(REWARD_INVALID): it raises, or returns neither a finite number nor a dict with a finite ``score``.
    """
    import asyncio

    from verl_workflow.code import load_function

    truth = row["reward_model"]["ground_truth"]
    function = load_function(reward.function, code_dir, error_code=ErrorCode.REWARD_INVALID)
    arguments = {
        "data_source": row["data_source"],
        "solution_str": truth,
        "ground_truth": truth,
        "extra_info": row["extra_info"],
        **reward.kwargs,
    }
    try:
        value = function(**arguments)
        if inspect.isawaitable(value):
            value = asyncio.run(_awaited(value))
    except Exception as error:
        raise _invalid(reward, row, f"the reward raised {type(error).__name__}: {error}", None) from error
    score = value.get("score") if isinstance(value, Mapping) else value
    if isinstance(value, Mapping) and "score" not in value:
        raise _invalid(reward, row, "the reward returned a dict without 'score'", value)
    if not _is_number(score):
        raise _invalid(reward, row, "the reward returned no number", value)
    if not math.isfinite(float(score)):  # type: ignore[arg-type]
        raise _invalid(reward, row, "the reward returned a number that is not finite", value)


async def _awaited(value: Any) -> Any:
    return await value


def _is_number(value: Any) -> bool:
    if isinstance(value, (str, bytes)):
        return False
    try:
        float(value)
    except (TypeError, ValueError):
        return False
    return True


def _invalid(reward: Reward, row: Mapping[str, Any], what: str, value: Any) -> UserError:
    info = row["extra_info"]
    return UserError(
        ErrorCode.REWARD_INVALID,
        f"{what}, tried on {info['split']} row {info['index']} (data_source {row['data_source']!r}, "
        f"ground_truth {row['reward_model']['ground_truth']!r} given as the reply)",
        where=reward.function,
        value=value,
        remedy="Return a finite float, or a dict with a finite 'score', for every reply.",
    )
