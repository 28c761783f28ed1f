"""Every error a user can meet: one base class, a stable code, and a message that says what to do.

`str(error)` reads as ``what (where): value. Remedy``. Errors survive pickling, since they cross Ray workers, and
`to_json` gives programs the same facts. `UserError` is for input that its author can mend and maps to exit code 2;
everything else maps to exit code 1.
"""

from __future__ import annotations

import enum
from typing import Any


class ErrorCode(str, enum.Enum):
    """Stable identifiers: written to journals and printed by ``--json``; never renamed."""

    USAGE_INVALID = "usage_invalid"
    SPEC_INVALID = "spec_invalid"
    SPEC_SYNTAX = "spec_syntax"
    FILE_MISSING = "file_missing"
    FILE_EXISTS = "file_exists"
    PARAM_INVALID = "param_invalid"
    RUN_ID_INVALID = "run_id_invalid"
    RUN_UNKNOWN = "run_unknown"
    RUN_EXISTS = "run_exists"
    RUN_TERMINAL = "run_terminal"
    RUN_OWNED = "run_owned"
    DEFINITION_CHANGED = "definition_changed"
    FENCED = "fenced"
    CANCELLED = "cancelled"
    JOURNAL_DAMAGED = "journal_damaged"
    EVENT_CONFLICT = "event_conflict"
    STORAGE = "storage"
    STEP_FAILED = "step_failed"
    STEP_TIMEOUT = "step_timeout"
    WORKER_LOST = "worker_lost"
    DATA_INVALID = "data_invalid"
    OVERRIDE_INVALID = "override_invalid"
    REWARD_INVALID = "reward_invalid"
    TRAINING_FAILED = "training_failed"
    NO_PROGRESS = "no_progress"
    CHECKPOINT_INVALID = "checkpoint_invalid"
    MODEL_INVALID = "model_invalid"
    GATE_INVALID = "gate_invalid"
    REGISTRY_CONFLICT = "registry_conflict"
    MODEL_UNKNOWN = "model_unknown"
    CAPACITY = "capacity"
    CLUSTER_UNREACHABLE = "cluster_unreachable"
    DEPENDENCY_MISSING = "dependency_missing"


class VerlWorkflowError(Exception):
    """Base of all errors raised on purpose.

    Args:
        code: the situation.
        what: one sentence fragment that says what is wrong, without a full stop.
        where: ``file:line:column``, a stage name or a path; empty when there is no such place.
        value: the offending value, shown with `repr` and cut at 200 characters; None when there is none.
        remedy: a sentence that says what to do.
        retryable: whether the same attempt made again may succeed.
    """

    def __init__(
        self,
        code: ErrorCode,
        what: str,
        *,
        where: str = "",
        value: Any = None,
        remedy: str = "",
        retryable: bool = False,
    ) -> None:
        self.code = ErrorCode(code)
        self.what = what
        self.where = where
        self.value = value
        self.remedy = remedy
        self.retryable = retryable
        super().__init__(str(self))

    def __str__(self) -> str:
        place = f"{self.where}: " if self.where else ""
        shown = f" (got {_short(self.value)})" if self.value is not None else ""
        said = f"{place}{self.what}{shown}"
        if not self.remedy:
            return said
        return f"{said} {self.remedy}" if said.endswith(("?", "!", ".")) else f"{said}. {self.remedy}"

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (
            type(self),
            self.code,
            self.what,
            self.where,
            self.value,
            self.remedy,
            self.retryable,
        )

    def to_json(self) -> dict[str, Any]:
        """The error as plain JSON, with `value` as its shortened `repr`."""
        return {
            "code": self.code.value,
            "what": self.what,
            "where": self.where,
            "value": None if self.value is None else _short(self.value),
            "remedy": self.remedy,
            "retryable": self.retryable,
            "message": str(self),
        }


class UserError(VerlWorkflowError, ValueError):
    """Input that its author can mend: the command line exits with 2 and prints no traceback."""


class FencedError(VerlWorkflowError):
    """Another driver has taken the run over: this one must stop at once and has committed nothing since."""


class UserErrors(UserError):
    """Several mistakes found in one pass, reported together.

    Args:
        errors: at least one; the code is that of the first.
    """

    def __init__(self, errors: list[UserError]) -> None:
        assert errors
        self.errors = list(errors)
        super().__init__(errors[0].code, "\n".join(str(error) for error in errors))

    def __reduce__(self) -> tuple[Any, ...]:
        return UserErrors, (self.errors,)

    def to_json(self) -> dict[str, Any]:
        return {**super().to_json(), "errors": [error.to_json() for error in self.errors]}


def _short(value: Any, limit: int = 200) -> str:
    try:
        text = repr(value)
    except (ValueError, RecursionError):
        # Python writes no whole number of thousands of digits in decimal, and nothing that is nested too deeply.
        text = hex(value) if isinstance(value, int) else f"a {type(value).__name__} that cannot be shown"
    return text if len(text) <= limit else text[: limit - 1] + "…"


def _rebuild(
    cls: type[VerlWorkflowError],
    code: ErrorCode,
    what: str,
    where: str,
    value: Any,
    remedy: str,
    retryable: bool,
) -> VerlWorkflowError:
    return cls(code, what, where=where, value=value, remedy=remedy, retryable=retryable)
