"""A few calls of the reward on one row, before anything is trained: they find most mistakes in a second."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from verl_workflow.errors import ErrorCode, UserError
from verl_workflow.spec._functions import REWARD_ARGUMENTS

if TYPE_CHECKING:
    from verl_workflow.spec import Reward


# Nothing, words, and bytes that are no text.
_JUNK = ("", "no number at all", "\ufffd C\ufffd\x00 ---")


def try_reward(reward: Reward, code_dir: Path, row: Mapping[str, Any]) -> None:
    """Call the reward with the right answer as the reply, and with what an untrained model replies.

    Args:
        row: in verl's schema.

    Raises:
        UserError(REWARD_INVALID): it takes other arguments, raises, or returns neither a finite number nor a dict with
            a finite ``score``.
    """
    from verl_workflow.code import load_function

    truth = row["reward_model"]["ground_truth"]
    function = load_function(reward.function, code_dir, error_code=ErrorCode.REWARD_INVALID)
    for reply in (truth, *_JUNK):
        given = row["data_source"], reply, truth, row["extra_info"]
        arguments = {**dict(zip(REWARD_ARGUMENTS, given, strict=True)), **reward.kwargs}
        _check_call(reward, function, arguments, row)


def _check_call(
    reward: Reward, function: Callable[..., Any], arguments: Mapping[str, Any], row: Mapping[str, Any]
) -> None:
    import asyncio

    reply = arguments["solution_str"]
    try:
        inspect.signature(function).bind(**arguments)
    except TypeError as error:
        raise UserError(
            ErrorCode.REWARD_INVALID,
            f"the reward cannot be called as verl calls it: {error}",
            where=reward.function,
            value=f"its signature is {inspect.signature(function)}",
            remedy=f"Let it take the arguments {', '.join(arguments)} by these names.",
        ) from error
    except ValueError:
        # A builtin without a signature: the call itself will tell.
        pass
    try:
        value = function(**arguments)
        if inspect.isawaitable(value):
            value = asyncio.run(_awaited(value))
    except Exception as error:
        raise _invalid(reward, row, reply, f"the reward raised {type(error).__name__}: {error}", None) from error
    score = value.get("score") if isinstance(value, Mapping) else value
    if isinstance(value, Mapping) and "score" not in value:
        raise _invalid(reward, row, reply, "the reward returned a dict without 'score'", value)
    if not _is_number(score):
        raise _invalid(reward, row, reply, "the reward returned no number", value)
    if not math.isfinite(float(score)):  # type: ignore[arg-type]
        raise _invalid(reward, row, reply, "the reward returned a number that is not finite", value)


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


def _invalid(reward: Reward, row: Mapping[str, Any], reply: str, what: str, value: Any) -> UserError:
    info = row["extra_info"]
    place = f"{info['split']} row {info['index']}" if {"split", "index"} <= info.keys() else "the first row"
    return UserError(
        ErrorCode.REWARD_INVALID,
        f"{what}, tried on {place} (data_source {row['data_source']!r}, ground_truth "
        f"{row['reward_model']['ground_truth']!r}, reply {reply!r})",
        where=reward.function,
        value=value,
        remedy="Return a finite float, or a dict with a finite 'score', for whatever a model may reply.",
    )
