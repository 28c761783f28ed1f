"""Results of earlier runs, found by their step's key."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from verl_workflow.errors import ErrorCode, VerlWorkflowError
from verl_workflow.storage import Store
from verl_workflow.stored_json import parse_json


@dataclass(frozen=True, kw_only=True)
class EarlierResult:
    """What a step of the run `run_id` returned."""

    run_id: str
    value: Any


def read_earlier(store: Store, key: str) -> EarlierResult | None:
    """The earlier result under a step's key, None when there is none.

    Raises:
        VerlWorkflowError(DATA_INVALID): the entry is not as a driver writes it; a driver then runs the step.
    """
    path = f"cache/{key}.json"
    data = store.get(path)
    if data is None:
        return None
    try:
        entry = parse_json(data)
    except ValueError as error:
        raise _damaged(path, f"it is not JSON ({error})") from error
    if not isinstance(entry, dict) or "value" not in entry or not isinstance(entry.get("run_id"), str):
        raise _damaged(path, "it does not hold a value and the run it is from")
    return EarlierResult(run_id=entry["run_id"], value=entry["value"])


def _damaged(path: str, why: str) -> VerlWorkflowError:
    return VerlWorkflowError(
        ErrorCode.DATA_INVALID,
        f"the earlier result is damaged: {why}",
        where=path,
        remedy="Nothing is to be done: the stage runs again.",
    )
