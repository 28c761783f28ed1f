"""What a journal is made of: one entry a file, each with a sequence number, the writer's epoch, and an event."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from verl_workflow.errors import ErrorCode, VerlWorkflowError


@dataclass(frozen=True, kw_only=True)
class Event:
    """Base of all events. `KIND` is what the file says."""

    KIND: ClassVar[str] = ""


@dataclass(frozen=True, kw_only=True)
class Claimed(Event):
    """A driver has taken the run; the entry's epoch is the new one.

    Attributes:
        owner: the driver's process, see `this_process`. steps: names of the plan's steps, in order.
    """

    KIND = "claimed"
    owner: dict[str, Any]
    steps: list[str]


@dataclass(frozen=True, kw_only=True)
class StepStarted(Event):
    """Written before the attempt is launched, so that its number is never given twice."""

    KIND = "step_started"
    step: str
    attempt: int


@dataclass(frozen=True, kw_only=True)
class StepSucceeded(Event):
    """The step's one commit. The value lies complete at `value_key`.

    Attributes:
        attempt: 0 when the value was taken from an earlier run. reused_from: id of that run.
    """

    KIND = "step_succeeded"
    step: str
    attempt: int
    value_key: str
    sha256: str
    reused_from: str | None = None


@dataclass(frozen=True, kw_only=True)
class StepFailed(Event):
    """An attempt has ended without a value.

    Attributes:
        error: see `VerlWorkflowError.to_json`; may hold a ``traceback``.
        will_retry: whether another attempt follows. retry_in_s: after how many seconds, at the earliest.
    """

    KIND = "step_failed"
    step: str
    attempt: int
    error: dict[str, Any]
    will_retry: bool
    retry_in_s: float = 0.0


@dataclass(frozen=True, kw_only=True)
class RunSucceeded(Event):
    KIND = "run_succeeded"


@dataclass(frozen=True, kw_only=True)
class RunFailed(Event):
    """Ends the run until it is resumed. `error` is that of the first step that failed for good."""

    KIND = "run_failed"
    error: dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class CancelRequested(Event):
    """Written by anybody: the one event that does not come from the run's owner."""

    KIND = "cancel_requested"
    by: dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class RunCancelled(Event):
    KIND = "run_cancelled"


_KINDS: dict[str, type[Event]] = {
    event.KIND: event
    for event in (
        Claimed,
        StepStarted,
        StepSucceeded,
        StepFailed,
        RunSucceeded,
        RunFailed,
        CancelRequested,
        RunCancelled,
    )
}
_JSON_TYPES: dict[str, tuple[type, ...]] = {
    "str": (str,),
    "str | None": (str, type(None)),
    "int": (int,),
    "float": (int, float),
    "bool": (bool,),
    "dict[str, Any]": (dict,),
    "list[str]": (list,),
}


@dataclass(frozen=True, kw_only=True)
class Entry:
    """One journal file.

    Attributes:
        seq: 0, 1, ... without gaps. epoch: of the writer, 0 before the first claim.
        time: seconds since 1970; never less than that of the entry before, whatever the writers' clocks say.
    """

    seq: int
    epoch: int
    time: float
    event: Event

    def to_bytes(self) -> bytes:
        head = {"kind": self.event.KIND, "seq": self.seq, "epoch": self.epoch, "time": self.time}
        return json.dumps({**head, **dataclasses.asdict(self.event)}).encode()

    @classmethod
    def from_bytes(cls, data: bytes, key: str, seq: int) -> Entry:
        """Raises VerlWorkflowError(JOURNAL_DAMAGED) that names `key` unless this is a whole entry numbered `seq`."""
        try:
            fields = json.loads(data)
        except ValueError as error:
            raise damaged(key, f"it is not JSON ({error})") from error
        if not isinstance(fields, dict):
            raise damaged(key, "it is not a JSON object")
        kind = _KINDS.get(str(fields.get("kind")))
        if kind is None:
            raise damaged(key, f"its kind {fields.get('kind')!r} is not known to this version")
        head = {name: _typed(fields, name, "int", key) for name in ("seq", "epoch")}
        if head["seq"] != seq:
            raise damaged(key, f"it says to be number {head['seq']}")
        body = {
            field.name: _typed(fields, field.name, str(field.type), key)
            for field in dataclasses.fields(kind)
            if field.name in fields or field.default is dataclasses.MISSING
        }
        return cls(**head, time=float(_typed(fields, "time", "float", key)), event=kind(**body))


def _typed(fields: Mapping[str, Any], name: str, wanted: str, key: str) -> Any:
    value = fields.get(name)
    types = _JSON_TYPES[wanted]
    if not isinstance(value, types) or (isinstance(value, bool) and bool not in types):
        raise damaged(key, f"its {name} is {value!r}, not {wanted}")
    return value


def damaged(key: str, why: str) -> VerlWorkflowError:
    """The error for journal or value files that are not as they were written."""
    return VerlWorkflowError(
        ErrorCode.JOURNAL_DAMAGED,
        f"the run's record is damaged: {why}",
        where=key,
        remedy="Restore this file from a backup of the storage, or start a new run; other runs are not affected.",
    )
