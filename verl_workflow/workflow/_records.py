"""What a journal is made of: one entry a file, each with a sequence number, the writer's epoch, and an event."""

from __future__ import annotations

import dataclasses
import json
import re
import reprlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, TypeGuard

from verl_workflow.errors import ErrorCode, VerlWorkflowError
from verl_workflow.stored_json import is_number, parse_json
from verl_workflow.workflow._plan import is_step_name


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
_YEAR_10000 = 253402300800.0
_KEY_PART = re.compile(r"(?!\.\.?$)[A-Za-z0-9._-]+")
# Steps and values are looked up in the storage by these: one that leads elsewhere must not be followed.
_CHECKS: dict[str, Callable[[Any], bool]] = {
    "step": is_step_name,
    "steps": lambda names: all(isinstance(name, str) and is_step_name(name) for name in names),
    "value_key": lambda key: all(map(_KEY_PART.fullmatch, key.split("/"))),
}
_TYPE_CHECKS: dict[str, Callable[[Any], bool]] = {"float": is_number}


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
            fields = parse_json(data)
        except ValueError as error:
            raise damaged(key, f"it is not JSON ({error})") from error
        if not isinstance(fields, dict):
            raise damaged(key, "it is not a JSON object")
        named = fields.get("kind")
        kind = _KINDS.get(named) if isinstance(named, str) else None
        if kind is None:
            raise damaged(key, f"its kind {reprlib.repr(named)} is not known to this version")
        head = {name: _typed(fields, name, "int", key) for name in ("seq", "epoch")}
        if head["seq"] != seq:
            raise damaged(key, f"it says to be number {head['seq']}")
        body = {
            field.name: _typed(fields, field.name, str(field.type), key)
            for field in dataclasses.fields(kind)
            if field.name in fields or field.default is dataclasses.MISSING
        }
        at = fields.get("time")
        if not is_time(at):
            raise damaged(key, f"its time is {reprlib.repr(at)}, not seconds since 1970")
        return cls(**head, time=float(at), event=kind(**body))


def is_time(value: Any) -> TypeGuard[int | float]:
    """Whether this is a point in time that a calendar can show, in seconds since 1970."""
    return is_number(value) and 0 <= value < _YEAR_10000


def _typed(fields: Mapping[str, Any], name: str, wanted: str, key: str) -> Any:
    value = fields.get(name)
    types = _JSON_TYPES[wanted]
    if not isinstance(value, types) or (isinstance(value, bool) and bool not in types):
        raise damaged(key, f"its {name} is {reprlib.repr(value)}, not {wanted}")
    check = _CHECKS.get(name) or _TYPE_CHECKS.get(wanted)
    if check is not None and not check(value):
        raise damaged(key, f"its {name} is {reprlib.repr(value)}, which cannot be one")
    return value


def damaged(key: str, why: str) -> VerlWorkflowError:
    """The error for journal or value files that are not as they were written."""
    return VerlWorkflowError(
        ErrorCode.JOURNAL_DAMAGED,
        f"the run's record is damaged: {why}",
        where=key,
        remedy="Restore this file from a backup of the storage, or start a new run; other runs are not affected.",
    )
