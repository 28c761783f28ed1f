"""What a run was asked to be: one record, written when it is made, and never changed."""

from __future__ import annotations

import difflib
import json
import reprlib
import time
from collections.abc import Mapping
from typing import Any

from verl_workflow.errors import ErrorCode, UserError, VerlWorkflowError
from verl_workflow.storage import Store
from verl_workflow.stored_json import parse_json
from verl_workflow.workflow._damage import damaged
from verl_workflow.workflow._names import RunKey, check_name, is_incarnation, is_key, is_name, path_part, run_folder
from verl_workflow.workflow._records import Event, event_from_json, is_time


def check_run_id(run_id: str) -> None:
    """Raise UserError(RUN_ID_INVALID) unless this is 1 to 200 characters, and neither ``.`` nor ``..``."""
    check_name(run_id, "id of a run", ErrorCode.RUN_ID_INVALID)


def create_run(
    store: Store, run_id: str, definition: Mapping[str, Any], *, incarnation: str | None = None, **more: Any
) -> RunKey:
    """Record a new run; it is PENDING until a driver takes it.

    Args:
        definition: plain JSON, never changed afterwards. more: further parts of the record.
        incarnation: of a `RunKey` under which something was written already; by default a new one.

    Raises:
        UserError: RUN_ID_INVALID, or RUN_EXISTS. Nothing has been written.
    """
    check_run_id(run_id)
    key = RunKey.new(run_id) if incarnation is None else RunKey(run_id=run_id, incarnation=incarnation)
    stored = {"format": 1, **vars(key), "created_at": time.time(), "definition": definition, **more}
    data = json.dumps(stored, allow_nan=False).encode()
    # What is there may be this very record: the answer got lost, and the storage's client asked again.
    if not store.create(definition_key(run_id), data) and store.get(definition_key(run_id)) != data:
        raise UserError(
            ErrorCode.RUN_EXISTS,
            "a run of this id exists already",
            where=store.uri,
            value=run_id,
            remedy="Resume it, or choose another id.",
        )
    return key


def delete_run(store: Store, run_id: str, incarnation: str = "") -> None:
    """Remove a run with all that lies in its folder; from the first moment on there is none of this id.

    Once it has begun, another run may take the id, and loses nothing.

    Args:
        incarnation: do nothing if the id is not this one's any more; by default whichever has it is removed.
    """
    if incarnation and not bears(store, RunKey(run_id=run_id, incarnation=incarnation)):
        return
    # What comes later is not this run's.
    keys = [key for key in store.list(run_folder(run_id)) if key != definition_key(run_id)]
    own = RunKey(run_id=run_id, incarnation=incarnation).folder if incarnation else None
    left = [path for path, _, _ in store.unfinished(own)] if own is not None else []
    store.delete(definition_key(run_id))
    for path in left:
        path.unlink(missing_ok=True)
    store.delete_all(keys, run_folder(run_id))


def bears(store: Store, run: RunKey) -> bool:
    """Whether the id is still this run's: it may have been deleted, and another one have it."""
    try:
        return run_key(store, run.run_id) == run
    except UserError:
        return False


def run_exists(store: Store, run_id: str) -> bool:
    """Whether a run of this id was created, damaged or not."""
    return store.get(definition_key(run_id)) is not None


def read_definition(store: Store, run_id: str) -> dict[str, Any]:
    """What `create_run` stored: ``definition``, ``created_at`` and more. Raises like `read_run`."""
    check_run_id(run_id)
    stored = parse_definition(store, definition_key(run_id))
    if stored is None:
        # What is left of it may still have a folder.
        others = [folder for folder in store.folders("runs") if folder != path_part(run_id)]
        close = difflib.get_close_matches(run_id, others, n=1)
        raise UserError(
            ErrorCode.RUN_UNKNOWN,
            "there is no run of this id",
            where=store.uri,
            value=run_id,
            remedy=f"Did you mean {close[0]}?" if close else "List the runs with: list.",
        )
    if stored["run_id"] != run_id:
        raise foreign(definition_key(run_id), stored["run_id"])
    return stored


def foreign(key: str, run_id: str) -> VerlWorkflowError:
    """What is said of a definition that lies where another one should."""
    return damaged(key, f"it is that of the run {reprlib.repr(run_id)}")


def run_key(store: Store, run_id: str) -> RunKey:
    """Which run bears this id now. Raises like `read_run`."""
    return key_of(read_definition(store, run_id))


def key_of(stored: Mapping[str, Any]) -> RunKey:
    """The key in what `read_definition` gives."""
    return RunKey(run_id=stored["run_id"], incarnation=stored["incarnation"])


def parse_definition(store: Store, key: str) -> dict[str, Any] | None:
    """As `read_definition`, by the file's key; None when there is none."""
    data = store.get(key)
    if data is None:
        return None
    try:
        stored = parse_json(data)
    except ValueError as error:
        raise damaged(key, f"it is not JSON ({error})") from error
    if not isinstance(stored, dict) or not isinstance(stored.get("definition"), dict):
        raise damaged(key, "it does not hold a definition")
    if not is_name(stored.get("run_id")):
        raise damaged(key, f"its run_id is {reprlib.repr(stored.get('run_id'))}, not an id")
    if not is_incarnation(stored.get("incarnation")):
        raise damaged(key, f"its incarnation is {reprlib.repr(stored.get('incarnation'))}, not 16 hexadecimal digits")
    if not is_time(stored.get("created_at")):
        raise damaged(key, f"its created_at is {reprlib.repr(stored.get('created_at'))}, not seconds since 1970")
    if "workflow" in stored["definition"]:
        _check_workflow(stored["definition"]["workflow"], key)
    return stored


def _check_workflow(workflow: Any, key: str) -> None:
    kinds = {"graph": str, "sha256": str, "root": str, "metadata": dict}
    if not isinstance(workflow, dict):
        raise damaged(key, f"its workflow is {reprlib.repr(workflow)}, not a graph of steps")
    for name, kind in kinds.items():
        if not isinstance(workflow.get(name), kind):
            raise damaged(key, f"its workflow's {name} is {reprlib.repr(workflow.get(name))}")
    if not is_key(workflow["graph"]):
        raise damaged(key, f"its graph is {reprlib.repr(workflow['graph'])}, not a file of the storage")


def seed_of(stored: Mapping[str, Any]) -> list[Event]:
    """Events of the steps that a fork takes over, as its definition tells them. Raises as `read_run`."""
    key = definition_key(stored["run_id"])
    return [event_from_json(event, key) for event in stored.get("seed", [])]


def definition_key(run_id: str) -> str:
    """Where the record lies."""
    return f"{run_folder(run_id)}/definition.json"
