"""The inside of an attempt: call the step's function where it was sent to, and carry its outcome back whole."""

from __future__ import annotations

import json
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from verl_workflow.errors import ErrorCode, UserError, UserErrors, VerlWorkflowError
from verl_workflow.storage import Store
from verl_workflow.workflow._plan import StepContext
from verl_workflow.workflow._state import progress_key

_REPORT_INTERVAL_S = 1.0


@dataclass(frozen=True, kw_only=True)
class Call:
    """What travels to where a step runs."""

    call: Callable[[StepContext], Any]
    store_uri: str
    run_id: str
    step: str
    attempt: int
    epoch: int
    inputs: Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class Returned:
    """The step's value as JSON."""

    data: bytes


@dataclass(frozen=True, kw_only=True)
class Raised:
    """The attempt has failed.

    Attributes:
        error: what was raised, if it is one of this package's errors; else None, as its class may not be known where it
            is read. kind, message: its type's name and text.
        traceback: as text, empty when the step's own code did not raise.
    """

    error: VerlWorkflowError | None
    kind: str
    message: str
    traceback: str = ""

    @classmethod
    def of(cls, error: BaseException, *, text: str = "") -> Raised:
        ours = error if isinstance(error, VerlWorkflowError) else None
        return cls(error=ours, kind=type(error).__name__, message=_message(error), traceback=text)

    @property
    def retryable(self) -> bool:
        """Whether another attempt may succeed: always, unless the error says that it cannot."""
        if isinstance(self.error, UserError):
            return False
        return self.error is None or self.error.retryable

    def to_json(self, step: str) -> dict[str, Any]:
        """As `VerlWorkflowError.to_json`, with ``step``, and ``traceback`` when there is one."""
        error = self.error or VerlWorkflowError(
            ErrorCode.STEP_FAILED, f"{self.kind}: {self.message}", where=step, retryable=True
        )
        facts = {**error.to_json(), "step": step}
        return {**facts, "traceback": self.traceback} if self.traceback else facts


Outcome = Returned | Raised


def execute(call: Call) -> Outcome:
    """Run the step's function here and now; nothing it raises gets out, an exit or an interrupt included."""
    report = _Report(call)
    context = StepContext(
        run_id=call.run_id,
        step=call.step,
        attempt=call.attempt,
        epoch=call.epoch,
        inputs=call.inputs,
        report=report,
    )
    try:
        return Returned(data=_encoded(call.call(context), call.step))
    except BaseException as error:  # noqa: BLE001 - it is handed on as the outcome
        return _raised(error)
    finally:
        report.close()


def _encoded(value: Any, step: str) -> bytes:
    try:
        return json.dumps(value, allow_nan=False).encode()
    except (TypeError, ValueError) as error:
        raise VerlWorkflowError(
            ErrorCode.STEP_FAILED,
            f"the step returned what JSON cannot hold: {error}",
            where=step,
            value=value,
            remedy="Return plain JSON; write anything else to a file and return its path.",
        ) from error


def _raised(error: BaseException) -> Raised:
    try:
        text = "".join(traceback.format_exception(type(error), error, error.__traceback__))
    except Exception:  # noqa: BLE001 - formatting calls the user's own methods; the frames are what is left
        text = "".join(traceback.format_tb(error.__traceback__))
    return Raised.of(_plain(error), text=text)


def _plain(error: BaseException) -> BaseException:
    """One of this package's errors without classes and values that only the step's worker can load."""
    if not isinstance(error, VerlWorkflowError):
        return error
    if isinstance(error, UserErrors):
        return UserErrors([UserError(**_fields(single)) for single in error.errors])
    return (UserError if isinstance(error, UserError) else VerlWorkflowError)(**_fields(error))


def _fields(error: VerlWorkflowError) -> dict[str, Any]:
    value = error.value
    try:
        json.dumps(value)
    except (TypeError, ValueError, RecursionError):
        value = _message(value)
    names = ("code", "what", "where", "remedy", "retryable")
    return {**{name: getattr(error, name) for name in names}, "value": value}


def _message(thing: object) -> str:
    try:
        return str(thing)
    except Exception as error:  # noqa: BLE001 - the user's own __str__
        return f"(its text cannot be shown: {type(error).__name__})"


class _Report:
    """Writes an attempt's progress at most once a second; the last facts given are written in the end."""

    def __init__(self, call: Call) -> None:
        self._call = call
        self._lock = threading.Lock()
        self._pending: dict[str, Any] | None = None
        self._written_at = float("-inf")
        self._timer: threading.Timer | None = None
        self._store: Store | None = None

    def __call__(self, facts: Mapping[str, Any]) -> None:
        with self._lock:
            self._pending = dict(facts)
            due = self._written_at + _REPORT_INTERVAL_S - time.monotonic()
            if due <= 0:
                self._write()
            elif self._timer is None:
                self._timer = threading.Timer(due, self._flush)
                self._timer.daemon = True
                self._timer.start()

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._flush()

    def _flush(self) -> None:
        with self._lock:
            self._timer = None
            self._write()

    def _write(self) -> None:
        if self._pending is None:
            return
        facts, self._pending = self._pending, None
        self._written_at = time.monotonic()
        call = self._call
        stored = {"attempt": call.attempt, "epoch": call.epoch, "time": time.time(), "facts": facts}
        try:
            self._store = self._store or Store(call.store_uri)
            self._store.put(progress_key(call.run_id, call.step), json.dumps(stored, default=str).encode())
        except VerlWorkflowError:
            # Progress is for the eye; a storage in trouble is met by the driver, which does say so.
            self._store = None
