"""A run that was taken up again and waits for its turn: what its host has to know of that when it is rebuilt."""

from __future__ import annotations

import json
from dataclasses import dataclass

from verl_workflow.storage import Store
from verl_workflow.stored_json import parse_json
from verl_workflow.workflow._host_life import is_alive
from verl_workflow.workflow._names import RunKey
from verl_workflow.workflow._records import StepsReset


@dataclass(frozen=True, kw_only=True)
class Turn:
    """Attributes: host: token of the one in whose queue it is. reset: what is to be executed again."""

    host: str
    reset: StepsReset | None = None


def record_turn(store: Store, run: RunKey, turn: Turn) -> None:
    """Say that a run waits for its turn."""
    reset = None if turn.reset is None else vars(turn.reset)
    store.put(_key(run), json.dumps({"host": turn.host, "reset": reset}).encode())


def clear_turn(store: Store, run: RunKey) -> None:
    """Its turn has come, or it has been withdrawn."""
    store.delete(_key(run))


def read_turn(store: Store, run: RunKey) -> Turn | None:
    """What was recorded, None when there is nothing that can be read: it is a hint, never the truth."""
    data = store.get(_key(run))
    try:
        found = parse_json(data) if data is not None else None
    except ValueError:
        return None
    if not isinstance(found, dict) or not isinstance(found.get("host"), str):
        return None
    reset = found.get("reset")
    if not isinstance(reset, dict):
        return Turn(host=found["host"])
    try:
        return Turn(host=found["host"], reset=StepsReset(**reset))
    except TypeError:
        return None


def waiting_turn(store: Store, run: RunKey) -> Turn | None:
    """The same, if the host shows signs of life."""
    turn = read_turn(store, run)
    return turn if turn is not None and is_alive(store, turn.host) else None


def _key(run: RunKey) -> str:
    return f"{run.folder}/turn.json"
