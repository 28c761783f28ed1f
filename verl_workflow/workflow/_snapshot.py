"""Snapshots of a run's state, so that a long journal needs not be read from its beginning.

A snapshot follows from the entries before it alone, whoever writes it. One that cannot be read is passed over: unless
`gc` has removed them, the entries it stands for are still there.
"""

from __future__ import annotations

import hashlib
import json
import logging
from dataclasses import dataclass
from typing import Any

from verl_workflow.errors import ErrorCode, VerlWorkflowError
from verl_workflow.storage import Store
from verl_workflow.stored_json import parse_json
from verl_workflow.workflow._damage import damaged
from verl_workflow.workflow._fold import Attempt, Folded, FoldedStep, RunStatus, StepStatus
from verl_workflow.workflow._names import RunKey
from verl_workflow.workflow._records import Event, StepContinued, StepSucceeded, event_from_json

_FORMAT = 1
_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Snapshot:
    """Attributes: next: number of the first entry that is not in `state`. time: of the last one that is."""

    next: int
    time: float
    state: Folded


def write_snapshot(store: Store, run: RunKey, snapshot: Snapshot, *, renew: bool = False) -> None:
    """Keep a snapshot, and the last one before it; one of the same number says the same, and is replaced only with
    `renew`.
    """
    folder = _folder(run)
    facts = {"run": run.incarnation, "next": snapshot.next, "time": snapshot.time}
    body = json.dumps({**facts, "state": _state_to_json(snapshot.state)})
    text = json.dumps({"format": _FORMAT, "sha256": hashlib.sha256(body.encode()).hexdigest(), "body": body})
    older = store.list(folder)
    key = f"{folder}/{snapshot.next:012}.json"
    if renew:
        store.put(key, text.encode())
    else:
        store.create(key, text.encode())
    # The last one stays, for those who are just reading it.
    for each in older[:-1]:
        if each != key:
            store.delete(each)


def read_snapshot(store: Store, run: RunKey) -> Snapshot | None:
    """The newest snapshot that can be read, None when there is none."""
    for key in reversed(store.list(_folder(run))):
        try:
            return _parse(store.get(key) or b"", key, run)
        except VerlWorkflowError as error:
            if error.code is not ErrorCode.JOURNAL_DAMAGED:
                raise
            _log.warning("%s", error)
    return None


def _folder(run: RunKey) -> str:
    return f"{run.folder}/snapshots"


def _parse(data: bytes, key: str, run: RunKey) -> Snapshot:
    try:
        outer = parse_json(data)
        if outer["format"] != _FORMAT or hashlib.sha256(outer["body"].encode()).hexdigest() != outer["sha256"]:
            raise ValueError("its digest or format is another one")
        body = parse_json(outer["body"].encode())
        if body["run"] != run.incarnation:
            raise ValueError("it belongs to another run")
        return Snapshot(next=body["next"], time=body["time"], state=_state_from_json(body["state"], key))
    except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
        raise damaged(key, f"it is no snapshot ({type(error).__name__}: {error})") from error


def _state_to_json(state: Folded) -> dict[str, Any]:
    return {
        **vars(state),
        "status": state.status.value,
        "steps": {name: _step_to_json(step) for name, step in state.steps.items()},
    }


def _state_from_json(found: dict[str, Any], key: str) -> Folded:
    steps = {name: _step_from_json(step, key) for name, step in found["steps"].items()}
    return Folded(**{**found, "status": RunStatus(found["status"]), "steps": steps})


def _step_to_json(step: FoldedStep) -> list[Any]:
    return [
        step.status.value,
        [[a.number, a.epoch, a.started_at, a.ended_at, a.status.value, a.error] for a in step.attempts],
        step.failures,
        step.crashes,
        step.retry_at,
        _event_to_json(step.committed),
        _event_to_json(step.continued),
        step.code,
        step.used,
    ]


def _step_from_json(found: list[Any], key: str) -> FoldedStep:
    status, attempts, failures, crashes, retry_at, committed, continued, code, used = found
    succeeded = event_from_json(committed, key) if committed is not None else None
    went_on = event_from_json(continued, key) if continued is not None else None
    if not isinstance(succeeded, StepSucceeded | None) or not isinstance(went_on, StepContinued | None):
        raise ValueError("a step was committed by another event")
    return FoldedStep(
        status=StepStatus(status),
        attempts=[
            Attempt(number=n, epoch=epoch, started_at=start, ended_at=end, status=StepStatus(how), error=error)
            for n, epoch, start, end, how, error in attempts
        ],
        failures=failures,
        crashes=crashes,
        retry_at=retry_at,
        committed=succeeded,
        continued=went_on,
        code=code,
        used=used,
    )


def _event_to_json(event: Event | None) -> dict[str, Any] | None:
    return None if event is None else {"kind": event.KIND, **vars(event)}
