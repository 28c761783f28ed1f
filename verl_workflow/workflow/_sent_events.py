"""Events that come from outside: kept in the workflow's own folder, before it asks for them and after."""

from __future__ import annotations

import asyncio
import json
import logging
import reprlib
from dataclasses import dataclass
from typing import Any

from verl_workflow.errors import ErrorCode, UserError, VerlWorkflowError
from verl_workflow.storage import Store
from verl_workflow.stored_json import parse_json
from verl_workflow.workflow._damage import damaged
from verl_workflow.workflow._definition import run_key
from verl_workflow.workflow._events import EventListener
from verl_workflow.workflow._names import RunKey, check_name, path_part
from verl_workflow.workflow._node import current, current_store

_FIRST_POLL_S = 0.05
_LONGEST_POLL_S = 1.0
# Between a refused write and the look at what is there, the workflow may have been deleted and made anew.
_TRIES = 5
_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class SentEvent:
    """Attributes: payload: plain JSON."""

    key: str
    payload: Any


def store_event(store: Store, workflow_id: str, event_key: str, payload: Any) -> bool:
    """Keep an event for a workflow, whether or not it waits for it yet.

    Args:
        event_key: 1 to 200 characters; belongs to this workflow alone. payload: plain JSON.

    Returns:
        False when the very same event was there already.

    Raises:
        UserError: RUN_UNKNOWN or RUN_ID_INVALID; USAGE_INVALID, the key cannot be one; DATA_INVALID, the payload is no
            JSON; EVENT_CONFLICT, another payload was sent under this key. Nothing has been written.
    """
    check_name(event_key, "key of an event", ErrorCode.USAGE_INVALID)
    try:
        text = json.dumps(payload, allow_nan=False)
        sent = parse_json(text)
    except (TypeError, ValueError, RecursionError) as error:
        raise UserError(
            ErrorCode.DATA_INVALID,
            f"JSON cannot hold the payload of the event: {error}",
            where=event_key,
            value=payload,
            remedy="Send plain JSON: texts, finite numbers, true, false, null, and lists and objects of them.",
        ) from error
    run = run_key(store, workflow_id)
    data = json.dumps({"event_key": event_key, "payload": sent}).encode()
    for _ in range(_TRIES):
        if store.create(_key(run, event_key), data):
            return True
        found = read_event(store, run, event_key)
        if found is None:
            continue
        # True and 1 are equal to Python alone.
        if json.dumps(found.payload, sort_keys=True) == json.dumps(sent, sort_keys=True):
            return False
        raise UserError(
            ErrorCode.EVENT_CONFLICT,
            "another payload was sent to the workflow under this key",
            where=event_key,
            value=found.payload,
            remedy="An event does not change: send this one under a key of its own.",
        )
    raise VerlWorkflowError(
        ErrorCode.STORAGE,
        "the storage refuses an event and shows none",
        where=_key(run, event_key),
        remedy="Check that the storage supports conditional writes.",
        retryable=True,
    )


def read_event(store: Store, run: RunKey, event_key: str) -> SentEvent | None:
    """An event that was sent to a workflow; None: there is none. Raises VerlWorkflowError(JOURNAL_DAMAGED) if it is
    not as it was written.
    """
    key = _key(run, event_key)
    data = store.get(key)
    if data is None:
        return None
    try:
        found = parse_json(data)
    except ValueError as error:
        raise damaged(key, f"it is not JSON ({error})") from error
    if not isinstance(found, dict) or found.get("event_key") != event_key or "payload" not in found:
        raise damaged(key, f"it is {reprlib.repr(found)}, not the event {event_key}")
    return SentEvent(key=event_key, payload=found["payload"])


class StorageListener(EventListener):
    """Gives ``(event_key, payload)`` of an event that `send_event` has sent to the workflow.

    One that was sent before the workflow asks for it is found too, and stays after it was taken.
    """

    async def poll_for_event(self, event_key: str | None = None) -> tuple[str, Any]:
        """Wait for the event of a key, by default the id of the task that waits."""
        context, store = current(), current_store()
        key = context.step if event_key is None else event_key
        check_name(key, "key of an event", ErrorCode.USAGE_INVALID)
        pause = _FIRST_POLL_S
        while True:
            try:
                # Apart from the loop, which all waiting steps share.
                found = await asyncio.to_thread(read_event, store, context.run, key)
            except VerlWorkflowError as error:
                if not error.retryable:
                    raise
                # A storage that stays away ends the driver, not this step.
                _log.warning("workflow %s: the event %s cannot be looked for: %s", context.run_id, key, error)
                found = None
            if found is not None:
                return found.key, found.payload
            await asyncio.sleep(pause)
            pause = min(pause * 1.5, _LONGEST_POLL_S)


class HTTPListener(StorageListener):
    """As `StorageListener`; its events may come in over HTTP too, see `serve_events`."""


def _key(run: RunKey, event_key: str) -> str:
    return f"{run.folder}/events/{path_part(event_key)}.json"
