"""What a journal holds: one frozen dataclass a kind of record."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, ClassVar

from verl_workflow.errors import ErrorCode, VerlWorkflowError


@dataclass(frozen=True, kw_only=True)
class Record:
    """Attributes: seq, its place in the log from 0; epoch of its writer, 0 for a bystander; time in Unix seconds."""

    kind: ClassVar[str]
    seq: int
    epoch: int
    time: float

    def to_bytes(self) -> bytes:
        return json.dumps({"kind": self.kind, **asdict(self)}, sort_keys=True).encode()


@dataclass(frozen=True, kw_only=True)
class Claimed(Record):
    """A driver has taken the run; every record of an older epoch after this one is refused."""

    kind: ClassVar[str] = "claimed"
    owner: Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class StepStarted(Record):
    kind: ClassVar[str] = "step_started"
    step: str
    attempt: int


@dataclass(frozen=True, kw_only=True)
class StepSucceeded(Record):
    """Attributes: value_key, where the value lies, complete before this record; sha256 of its bytes; reused_from, the
    run whose result was taken, if one was."""

    kind: ClassVar[str] = "step_succeeded"
    step: str
    attempt: int
    value_key: str
    sha256: str
    reused_from: str | None = None


@dataclass(frozen=True, kw_only=True)
class StepFailed(Record):
    kind: ClassVar[str] = "step_failed"
    step: str
    attempt: int
    error: Mapping[str, Any]
    will_retry: bool


@dataclass(frozen=True, kw_only=True)
class RunSucceeded(Record):
    kind: ClassVar[str] = "run_succeeded"


@dataclass(frozen=True, kw_only=True)
class RunFailed(Record):
    kind: ClassVar[str] = "run_failed"
    error: Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class CancelRequested(Record):
    """Written by anyone, at any time before the run has ended."""

    kind: ClassVar[str] = "cancel_requested"


@dataclass(frozen=True, kw_only=True)
class RunCancelled(Record):
    kind: ClassVar[str] = "run_cancelled"


_KINDS: dict[str, type[Record]] = {
    cls.kind: cls
    for cls in (Claimed, StepStarted, StepSucceeded, StepFailed, RunSucceeded, RunFailed, CancelRequested, RunCancelled)
}


def parse(key: str, data: bytes) -> Record:
    """The record in `data`. Raises VerlWorkflowError(JOURNAL_DAMAGED) when it is not one."""
    try:
        content = json.loads(data)
        cls = _KINDS[content.pop("kind")]
        known = {field.name for field in fields(cls)}
        return cls(**{name: value for name, value in content.items() if name in known})
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise VerlWorkflowError(
            ErrorCode.JOURNAL_DAMAGED,
            f"the journal record cannot be read ({type(error).__name__}: {error})",
            where=key,
            value=data[:60],
            remedy="Restore this file from a backup of the storage; other runs are not affected.",
        ) from error
