"""What a journal is made of: entries, a file each, with a sequence number, the writer's epoch, and what happened.

An entry holds all that a driver had to write at that moment, so that a fan-out costs one file and not hundreds. Its
events are committed together or not at all.
"""

from __future__ import annotations

import base64
import binascii
import dataclasses
import json
import re
import reprlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, TypeGuard

from verl_workflow.stored_json import is_number, parse_json
from verl_workflow.workflow._damage import damaged
from verl_workflow.workflow._names import is_name
from verl_workflow.workflow._values import Codec, Value


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
    """The step's one commit. The value lies complete in the storage, or here.

    Attributes:
        attempt: 0 when the value was taken from elsewhere: an earlier run, or the error of a step that it continued to.
        codec, sha256, inline, value_key: the value; inline is base64. Both None: it was not to be kept, and whoever
            needs it after the driver's death has the step executed again.
        reused_from: id of the run the value is from.
    """

    KIND = "step_succeeded"
    step: str
    attempt: int
    sha256: str
    codec: str = Codec.JSON.value
    inline: str | None = None
    value_key: str | None = None
    reused_from: str | None = None

    @classmethod
    def of(
        cls, step: str, attempt: int, value: Value, *, kept: bool = True, reused_from: str | None = None
    ) -> StepSucceeded:
        inline = base64.b64encode(value.inline).decode() if kept and value.inline is not None else None
        return cls(
            step=step,
            attempt=attempt,
            sha256=value.sha256,
            codec=value.codec.value,
            inline=inline,
            value_key=value.key if kept else None,
            reused_from=reused_from,
        )

    @property
    def value_kept(self) -> bool:
        return self.inline is not None or self.value_key is not None

    @property
    def value(self) -> Value | None:
        """None when it was not kept."""
        if not self.value_kept:
            return None
        inline = None if self.inline is None else base64.b64decode(self.inline)
        return Value(codec=Codec(self.codec), sha256=self.sha256, inline=inline, key=self.value_key)


@dataclass(frozen=True, kw_only=True)
class StepContinued(Event):
    """The step has returned other steps; the value of the last of them becomes its own.

    Attributes:
        graph_key, sha256: the steps as they were returned. steps: their names in this run, each behind what it needs.
    """

    KIND = "step_continued"
    step: str
    attempt: int
    graph_key: str
    sha256: str
    steps: list[str]


@dataclass(frozen=True, kw_only=True)
class StepsReset(Event):
    """A run was taken up, and code has changed since its graph was made.

    Attributes:
        steps: to be executed again although they were committed.
        code: digests of the code that steps have from now on, by their names.
    """

    KIND = "steps_reset"
    steps: list[str]
    code: dict[str, Any] = dataclasses.field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class StepFailed(Event):
    """An attempt has ended without a value.

    Attributes:
        error: see `VerlWorkflowError.to_json`; may hold a ``traceback``, and ``pickle``, the exception in base64.
        will_retry: whether another attempt follows. retry_in_s: after how many seconds, at the earliest.
        crash: the attempt's process was lost, which has a budget of its own.
    """

    KIND = "step_failed"
    step: str
    attempt: int
    error: dict[str, Any]
    will_retry: bool
    retry_in_s: float = 0.0
    crash: bool = False


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
        StepContinued,
        StepsReset,
        StepFailed,
        RunSucceeded,
        RunFailed,
        CancelRequested,
        RunCancelled,
    )
}
# Looked up for each event of a journal.
_FIELDS = {name: dataclasses.fields(kind) for name, kind in _KINDS.items()}
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
_KEY_PART = re.compile(r"(?!\.\.?$)[A-Za-z0-9._=-]+")


def _is_key(key: str | None) -> bool:
    return key is None or all(map(_KEY_PART.fullmatch, key.split("/")))


def _is_base64(text: str | None) -> bool:
    try:
        base64.b64decode(text or "", validate=True)
    except (binascii.Error, ValueError):
        return False
    return True


# Values are looked up in the storage by their keys: one that leads elsewhere must not be followed.
_CHECKS: dict[str, Callable[[Any], bool]] = {
    "step": is_name,
    "steps": lambda names: all(map(is_name, names)),
    "value_key": _is_key,
    "graph_key": _is_key,
    "codec": lambda name: name in set(Codec),
    "inline": _is_base64,
}
_TYPE_CHECKS: dict[str, Callable[[Any], bool]] = {"float": is_number}


@dataclass(frozen=True, kw_only=True)
class Entry:
    """One journal file.

    Attributes:
        run: incarnation of the run that it belongs to. seq: 0, 1, ... without gaps.
        epoch: of the writer, 0 before the first claim.
        time: seconds since 1970; never less than that of the entry before, whatever the writers' clocks say.
        events: what happened, in order; at least one.
    """

    run: str
    seq: int
    epoch: int
    time: float
    events: tuple[Event, ...]

    def to_bytes(self) -> bytes:
        events = [{"kind": event.KIND, **vars(event)} for event in self.events]
        head = {"run": self.run, "seq": self.seq, "epoch": self.epoch, "time": self.time}
        return json.dumps({**head, "events": events}, allow_nan=False).encode()

    @classmethod
    def from_bytes(cls, data: bytes, key: str, seq: int, run: str) -> Entry:
        """Raises VerlWorkflowError(JOURNAL_DAMAGED) that names `key` unless this is entry `seq` of the run."""
        try:
            fields = parse_json(data)
        except ValueError as error:
            raise damaged(key, f"it is not JSON ({error})") from error
        if not isinstance(fields, dict):
            raise damaged(key, "it is not a JSON object")
        if fields.get("run") != run:
            raise damaged(key, f"it belongs to the run {reprlib.repr(fields.get('run'))}, not to {run!r}")
        head = {name: _typed(fields, name, "int", key) for name in ("seq", "epoch")}
        if head["seq"] != seq:
            raise damaged(key, f"it says to be number {head['seq']}")
        at = fields.get("time")
        if not is_time(at):
            raise damaged(key, f"its time is {reprlib.repr(at)}, not seconds since 1970")
        events = fields.get("events")
        if not isinstance(events, list) or not events:
            raise damaged(key, f"its events are {reprlib.repr(events)}, not a list of them")
        return cls(run=run, **head, time=float(at), events=tuple(event_from_json(event, key) for event in events))


def event_from_json(fields: Any, key: str) -> Event:
    """An event as `Entry.to_bytes` writes it. Raises VerlWorkflowError(JOURNAL_DAMAGED) that names `key`."""
    if not isinstance(fields, dict):
        raise damaged(key, f"an event of it is {reprlib.repr(fields)}, not a JSON object")
    named = fields.get("kind")
    kind = _KINDS.get(named) if isinstance(named, str) else None
    if kind is None:
        raise damaged(key, f"its kind {reprlib.repr(named)} is not known to this version")
    body = {
        field.name: _typed(fields, field.name, str(field.type), key)
        for field in _FIELDS[kind.KIND]
        if field.name in fields or field.default is dataclasses.MISSING
    }
    return kind(**body)


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
