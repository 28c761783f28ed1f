"""A run that was taken up again and is not claimed yet: what its host has to know of that when it is rebuilt."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from verl_workflow.storage import Store
from verl_workflow.stored_json import parse_json
from verl_workflow.workflow._host_life import is_alive
from verl_workflow.workflow._names import RunKey
from verl_workflow.workflow._records import StepsReset

_NOBODY = ""


@dataclass(frozen=True, kw_only=True)
class Turn:
    """Attributes:
    host: token of the one that will drive the run. reset: what is written with its claim. runtime_env: of the job
    whose wish it is.
    epoch: of the run when it was taken up: once it is claimed, this says nothing any more.
    """

    host: str
    epoch: int
    reset: StepsReset | None = None
    runtime_env: Mapping[str, Any] = field(default_factory=dict)


def record_turn(store: Store, run: RunKey, turn: Turn) -> None:
    """Say that a run is taken up; it is PENDING until it is claimed."""
    reset = None if turn.reset is None else vars(turn.reset)
    stored = {"host": turn.host, "epoch": turn.epoch, "reset": reset, "runtime_env": dict(turn.runtime_env)}
    store.put(_key(run), json.dumps(stored).encode())


def clear_turn(store: Store, run: RunKey) -> None:
    """It has been withdrawn, or has ended."""
    store.delete(_key(run))


def end_turn(store: Store, run: RunKey, host: str) -> None:
    """The driver of this host has stopped. What was never claimed is nobody's then, and does not wait any more."""
    turn = read_turn(store, run)
    if turn is not None and turn.host == host:
        clear_turn(store, run)


def give_up(store: Store, run: RunKey, host: str) -> None:
    """As `end_turn`, of one that cannot be driven; of a new run, that seems to be its host's for good, it is said."""
    turn = read_turn(store, run)
    if turn is None or turn.epoch == 0:
        record_turn(store, run, Turn(host=_NOBODY, epoch=0))
    elif turn.host == host:
        clear_turn(store, run)


def is_given_up(store: Store, run: RunKey) -> bool:
    """Whether a run that was never claimed will not be by its host."""
    turn = read_turn(store, run)
    return turn is not None and turn.host == _NOBODY


def read_turn(store: Store, run: RunKey) -> Turn | None:
    """What was recorded, None when there is nothing that can be read: it is a hint, never the truth."""
    data = store.get(_key(run))
    try:
        found = parse_json(data) if data is not None else None
    except ValueError:
        return None
    if not isinstance(found, dict) or not isinstance(found.get("host"), str) or not isinstance(found.get("epoch"), int):
        return None
    reset = found.get("reset")
    try:
        made = StepsReset(**reset) if isinstance(reset, dict) else None
    except TypeError:
        return None
    environment = found.get("runtime_env")
    return Turn(
        host=found["host"],
        epoch=found["epoch"],
        reset=made,
        runtime_env=environment if isinstance(environment, dict) else {},
    )


def waiting_turn(store: Store, run: RunKey, epoch: int) -> Turn | None:
    """The same, if the run has not been claimed since and the host shows signs of life."""
    turn = read_turn(store, run)
    return turn if turn is not None and turn.epoch == epoch and is_alive(store, turn.host) else None


def _key(run: RunKey) -> str:
    return f"{run.folder}/turn.json"
