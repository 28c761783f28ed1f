"""Results of earlier runs, found by their step's key."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from verl_workflow.errors import ErrorCode, UserError, VerlWorkflowError
from verl_workflow.storage import Store
from verl_workflow.stored_json import parse_json
from verl_workflow.workflow._plan import Step
from verl_workflow.workflow._values import Codec, Value

_CACHE_KEY = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,199}")


@dataclass(frozen=True, kw_only=True)
class EarlierResult:
    """What a step of the run `run_id` returned."""

    run_id: str
    value: Any

    def to_value(self) -> Value:
        return Value.of(json.dumps(self.value, allow_nan=False).encode(), Codec.JSON)


def cache_key_of(step: Step, inputs: Mapping[str, Any]) -> str:
    """What the step's `key` calls its result.

    Raises:
        UserError(SPEC_INVALID): it cannot name one.
        Exception: what `key` raises.
    """
    assert step.key is not None
    key = step.key(inputs)
    if _CACHE_KEY.fullmatch(key) is None or ".." in key:
        raise UserError(
            ErrorCode.SPEC_INVALID,
            "this cannot name an earlier result",
            where=f"{step.name}.key",
            value=key,
            remedy="Return letters, digits, '.', '-' and '_', 200 at most; a hexadecimal digest will do.",
        )
    return key


def read_earlier(store: Store, key: str) -> EarlierResult | None:
    """The earlier result under a step's key, None when there is none.

    Raises:
        VerlWorkflowError(DATA_INVALID): the entry is not as a driver writes it; a driver then runs the step.
    """
    path = _path(key)
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


def keep_result(store: Store, key: str, result: EarlierResult) -> None:
    """Let later runs find a result; one that is there under the same key is as good, and is replaced."""
    store.put(_path(key), json.dumps({"run_id": result.run_id, "value": result.value}).encode())


def _path(key: str) -> str:
    return f"cache/{key}.json"


def _damaged(path: str, why: str) -> VerlWorkflowError:
    return VerlWorkflowError(
        ErrorCode.DATA_INVALID,
        f"the earlier result is damaged: {why}",
        where=path,
        remedy="Nothing is to be done: the stage runs again.",
    )
