"""The inside of an attempt: call the step's function where it was sent to, and carry its outcome back whole."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import dataclasses
import json
import pickle
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from verl_workflow.errors import ErrorCode, UserError, UserErrors, VerlWorkflowError
from verl_workflow.storage import Store
from verl_workflow.workflow._names import RunKey
from verl_workflow.workflow._pickling import dumps, loads, try_load
from verl_workflow.workflow._plan import StepContext
from verl_workflow.workflow._report import Report
from verl_workflow.workflow._values import INLINE_LIMIT, Codec, Value

# The journal holds an error's text and its pickle, and everybody who looks at the run reads it.
_LONGEST_TEXT = 20_000
_LARGEST_PICKLE = 256 * 1024
_PLAIN = frozenset({bytes, str, int, float, bool, type(None)})
_NOT_THE_STEPS = frozenset({ErrorCode.STORAGE, ErrorCode.JOURNAL_DAMAGED})
_OWN = "verl_workflow_raised_by_step"


@dataclass(frozen=True, kw_only=True)
class Call:
    """What travels to where a step runs.

    Attributes:
        inputs: by step; a number stands for one of the held values that are handed over beside the call.
        value_key: where the value goes when it is too large for the journal, without an ending.
        clocked: the attempt says when it begins, for its time runs from then.
        heartbeat_s: for how long no sign of life may be missed.
    """

    call: Callable[[StepContext], Any]
    store: Store
    run: RunKey
    step: str
    attempt: int
    epoch: int
    inputs: Mapping[str, Value | int]
    value_key: str
    codec: Codec = Codec.JSON
    kept: bool = True
    clocked: bool = False
    heartbeat_s: float | None = None


@dataclass(frozen=True, kw_only=True)
class Returned:
    """The step's value. `held`: the bytes of one that is not kept, or Ray's reference to them; None: in `value`."""

    value: Value
    held: Any = None


@dataclass(frozen=True, kw_only=True)
class Continued:
    """The step has returned other steps, which lie under `graph_key`; `names` are what they wish to be called."""

    graph_key: str
    sha256: str
    names: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Raised:
    """The attempt has failed.

    Attributes:
        error: what was raised, if it is one of this package's errors; else None, as its class may not be known where it
            is read. kind, message: its type's name and text.
        traceback: as text, empty when the step's own code did not raise.
        pickle: the exception itself, when the step may return any object.
        crash: the process was lost. lost_inputs: values that were not kept are gone, and have to be computed again.
        again: what the step says of trying again; None: as the error does.
    """

    error: VerlWorkflowError | None
    kind: str
    message: str
    traceback: str = ""
    pickle: bytes | None = None
    crash: bool = False
    lost_inputs: bool = False
    again: bool | None = None

    @classmethod
    def of(cls, error: BaseException, *, text: str = "", **more: Any) -> Raised:
        ours = error if isinstance(error, VerlWorkflowError) else None
        return cls(error=ours, kind=type(error).__name__, message=_message(error), traceback=text, **more)

    @property
    def retryable(self) -> bool:
        """Whether another attempt may succeed: always, unless the error says that it cannot."""
        if self.again is not None:
            return self.again
        return self.error is None or (self.error.retryable and not isinstance(self.error, UserError))

    def to_json(self, step: str) -> dict[str, Any]:
        """As `VerlWorkflowError.to_json`, with ``step``, and ``traceback`` and ``pickle`` (base64) if there are any."""
        error = self.error or VerlWorkflowError(
            ErrorCode.STEP_FAILED, f"{self.kind}: {self.message}", where=step, retryable=True
        )
        facts = {**error.to_json(), "step": step}
        if self.traceback:
            facts["traceback"] = self.traceback
        if self.pickle is not None:
            data = self.pickle if len(self.pickle) <= _LARGEST_PICKLE else _stand_in(self.kind, self.message)
            facts["pickle"] = base64.b64encode(data).decode()
        return facts


Outcome = Returned | Continued | Raised


def execute(call: Call, *held: bytes) -> Outcome:
    """Run the step's function here and now; nothing it raises gets out, an exit or an interrupt included."""
    report = Report(call)
    try:
        if call.clocked:
            report({})
        return _outcome(call, call.call(_context(call, held, report)))
    except BaseException as error:  # noqa: BLE001 - it is handed on as the outcome
        return _raised(error, call)
    finally:
        report.close()


def packed(call: Call) -> bytes:
    """The call as it travels. Raises whatever pickling the user's function raises.

    Ray would pickle it by looking for each class in its module, which takes longer than all else that it does.
    """
    if call.codec is Codec.PICKLE:
        # A graph's function is pickled already, and the rest of it are classes of this package.
        return pickle.dumps(call)
    from ray import cloudpickle

    data: bytes = cloudpickle.dumps(call)
    return data


def execute_packed(data: bytes, *held: bytes) -> bytes:
    """As `execute`, with the outcome pickled as well."""
    return pickle.dumps(execute(pickle.loads(data), *held))


def execute_apart(data: bytes, *held: bytes) -> tuple[bytes, bytes | None]:
    """As `execute_packed`; the bytes of a value that is not kept come second, so as not to pass through the driver."""
    outcome = execute(pickle.loads(data), *held)
    if not isinstance(outcome, Returned) or outcome.value.inline is None:
        return pickle.dumps(outcome), None
    value = outcome.value.inline
    return pickle.dumps(Returned(value=dataclasses.replace(outcome.value, inline=None))), value


async def execute_hosted(call: Call, *held: bytes) -> Outcome:
    """As `execute`, for a step whose function gives an awaitable."""
    report = Report(call)
    try:
        if call.clocked:
            report({})
        return _outcome(call, await call.call(_context(call, held, report)))
    except BaseException as error:
        if isinstance(error, asyncio.CancelledError) and _is_being_cancelled():
            raise
        return _raised(error, call)
    finally:
        report.close()


def _is_being_cancelled() -> bool:
    """Whether somebody cancels this task; else its function has let out what something else was cancelled with."""
    task = asyncio.current_task()
    # Python 3.10 does not tell.
    return task is None or not hasattr(task, "cancelling") or task.cancelling() > 0


def _context(call: Call, held: Sequence[bytes], report: Report) -> StepContext:
    inputs = {
        name: loads(held[value], call.store) if isinstance(value, int) else value.load(call.store, name)
        for name, value in call.inputs.items()
    }
    return StepContext(
        run=call.run,
        step=call.step,
        attempt=call.attempt,
        epoch=call.epoch,
        inputs=inputs,
        report=report,
        earlier=report.earlier,
    )


def _outcome(call: Call, result: Any) -> Outcome:
    if isinstance(result, Continued):
        return result
    if call.codec is Codec.JSON:
        return Returned(value=Value.of(_encoded(result, call.step), Codec.JSON))
    data = dumps(result, call.store, f"{call.run.folder}/objects")
    _check_loads(data, result, call.step)
    value = Value.of(data, Codec.PICKLE)
    if call.kept and len(data) > INLINE_LIMIT:
        # Before the driver knows of it, so that no more than its name has to pass through there.
        key = f"{call.value_key}.pkl"
        call.store.put(key, data)
        value = dataclasses.replace(value, inline=None, key=key)
    return Returned(value=value)


def _check_loads(data: bytes, value: Any, step: str) -> None:
    """Raise when a pickle cannot be loaded: once committed, it would keep the workflow from ever going on."""
    if type(value) in _PLAIN:
        return
    try:
        try_load(data)
    except Exception as error:
        raise VerlWorkflowError(
            ErrorCode.STEP_FAILED,
            f"the step returned what can be pickled, but not loaded again: {type(error).__name__}: {_message(error)}",
            where=step,
            remedy="Return another object, or mend its __reduce__ or __setstate__.",
            retryable=True,
        ) from error


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


@contextlib.contextmanager
def own_errors() -> Iterator[None]:
    """Around the user's function: what it raises is the step's, even if this package has made it."""
    try:
        yield
    except VerlWorkflowError as error:
        setattr(error, _OWN, True)
        raise


def _is_the_engines(error: VerlWorkflowError) -> bool:
    return error.code in _NOT_THE_STEPS and not hasattr(error, _OWN)


def _raised(error: BaseException, call: Call) -> Raised:
    judge = getattr(call.call, "may_retry", None)
    own = not isinstance(error, VerlWorkflowError) or hasattr(error, _OWN)
    again = judge(error) if judge is not None and own else None
    if isinstance(error, VerlWorkflowError) and call.codec is Codec.PICKLE and _is_the_engines(error):
        # Neither the step's error to catch nor one of its attempts: its inputs or its value could not be handled.
        return Raised.of(_plain(error), crash=error.code is ErrorCode.STORAGE)
    pickled = _pickled(error, call) if call.codec is Codec.PICKLE else None
    try:
        text = "".join(traceback.format_exception(type(error), error, error.__traceback__))
    except BaseException:  # noqa: BLE001 - formatting calls the user's own methods; the frames are what is left
        text = "".join(traceback.format_tb(error.__traceback__))
    return Raised.of(_plain(error), text=_short(text), pickle=pickled, again=again)


def _pickled(error: BaseException, call: Call) -> bytes:
    """The exception; one that does not survive pickling is stood in for by its type's name and text."""
    try:
        data = dumps(error, call.store, f"{call.run.folder}/objects")
        try_load(data)
    except BaseException:  # noqa: BLE001 - both call the user's own methods, which may even exit
        return _stand_in(type(error).__name__, _message(error))
    return data


def _stand_in(kind: str, message: str) -> bytes:
    return pickle.dumps(VerlWorkflowError(ErrorCode.STEP_FAILED, f"{kind}: {message}", retryable=True))


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
        text = json.dumps(value)
        # Plain: what is like JSON may be of a class that the driver does not know.
        value = json.loads(text) if len(text) <= _LONGEST_TEXT else _message(value)
    except (TypeError, ValueError, RecursionError):
        value = _message(value)
    texts = {name: "".join(getattr(error, name)) for name in ("what", "where", "remedy")}
    return {**texts, "code": error.code, "retryable": bool(error.retryable), "value": value}


def _message(thing: object) -> str:
    try:
        return _short(str(thing))
    except BaseException as error:  # noqa: BLE001 - the user's own __str__, which may even exit
        return f"(its text cannot be shown: {type(error).__name__})"


def _short(text: str) -> str:
    left = len(text) - _LONGEST_TEXT
    return text if left <= 0 else f"{text[:_LONGEST_TEXT]}... and {left} more characters"
