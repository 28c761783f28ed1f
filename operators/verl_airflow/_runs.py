"""Runs as their journals tell them: the truth about a pipeline, whatever became of the job that started it."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from verl_workflow.errors import ErrorCode, UserError, VerlWorkflowError
from verl_workflow.outline import outline_of
from verl_workflow.spec import FailureClass
from verl_workflow.storage import Store
from verl_workflow.stored_json import is_number
from verl_workflow.workflow import FINAL_STATES, TERMINAL_STATES, RunState, RunStatus, read_run

# A training says its class in its message; errors of other stages are known by their codes.
_SAID = re.compile(r"\((" + "|".join(re.escape(kind.value) for kind in FailureClass) + r")\)")
_CLASSES = {
    FailureClass.CONFIGURATION: (
        ErrorCode.USAGE_INVALID,
        ErrorCode.SPEC_INVALID,
        ErrorCode.SPEC_SYNTAX,
        ErrorCode.FILE_MISSING,
        ErrorCode.PARAM_INVALID,
        ErrorCode.OVERRIDE_INVALID,
        ErrorCode.GATE_INVALID,
        ErrorCode.DEFINITION_CHANGED,
        ErrorCode.DEPENDENCY_MISSING,
        ErrorCode.MODEL_UNKNOWN,
    ),
    FailureClass.DATA: (ErrorCode.DATA_INVALID,),
    FailureClass.REWARD: (ErrorCode.REWARD_INVALID,),
    FailureClass.CAPACITY: (ErrorCode.CAPACITY,),
    FailureClass.CHECKPOINT: (ErrorCode.CHECKPOINT_INVALID,),
    FailureClass.STALL: (ErrorCode.NO_PROGRESS, ErrorCode.STEP_TIMEOUT),
    FailureClass.INFRASTRUCTURE: (ErrorCode.WORKER_LOST, ErrorCode.CLUSTER_UNREACHABLE, ErrorCode.STORAGE),
    FailureClass.CANCELLED: (ErrorCode.CANCELLED,),
}
_BY_CODE = {code.value: kind for kind, codes in _CLASSES.items() for code in codes}
# Another attempt would fail alike; numbers go wrong again from the checkpoint they went wrong after.
_HOPELESS = frozenset(
    {FailureClass.CONFIGURATION, FailureClass.DATA, FailureClass.REWARD, FailureClass.NUMERIC, FailureClass.CANCELLED}
)
# Of no class, and to be mended all the same before it can go on.
_HOPELESS_CODES = frozenset({ErrorCode.REGISTRY_CONFLICT.value, ErrorCode.MODEL_INVALID.value})
# XCom is no place for the results of a large sweep.
_MOST_STAGES = 32


@dataclass(frozen=True, kw_only=True)
class RunFailure:
    """Why a run has failed. `hopeless`: to resume it is of no use until somebody has mended something."""

    kind: FailureClass
    message: str
    hopeless: bool


def find_run(storage: str, run_id: str) -> RunState | None:
    """The run, or None when there is none of this id.

    Raises:
        UserError: the id or the URI cannot be used.
        VerlWorkflowError: STORAGE, or JOURNAL_DAMAGED.
    """
    try:
        return read_run(Store(storage), run_id, progress=False)
    except UserError as error:
        if error.code is ErrorCode.RUN_UNKNOWN:
            return None
        raise


def is_driven(state: RunState | None) -> bool:
    """Whether somebody works at it, or is expected to within seconds."""
    return state is not None and state.status in {RunStatus.RUNNING, RunStatus.PENDING}


def holds(state: RunState | None, until: str) -> bool:
    """Whether a wait is over: see `VerlRunTrigger`."""
    if until == "left":
        return not is_driven(state)
    return state is not None and state.status in (TERMINAL_STATES if until == "ended" else FINAL_STATES)


def failure_of(error: Mapping[str, Any]) -> RunFailure:
    """The class of what a run has failed by.

    Args:
        error: `RunState.error`.
    """
    message = str(error.get("message") or "the run has failed")
    said = _SAID.search(str(error.get("what") or "")) if error.get("code") == ErrorCode.TRAINING_FAILED.value else None
    kind = FailureClass(said[1]) if said else _BY_CODE.get(str(error.get("code")), FailureClass.UNKNOWN)
    return RunFailure(
        kind=kind,
        message=message.splitlines()[0],
        hopeless=kind in _HOPELESS or error.get("code") in _HOPELESS_CODES,
    )


def result_of(state: RunState, storage: str) -> dict[str, Any]:
    """What a task returns of a run that has succeeded: URIs and numbers, a few kilobytes at most.

    Returns:
        ``run_id``, ``storage``, ``status``, ``seconds``; ``scores`` by evaluate stage; ``rewards`` (the last) by verl
        stage; and of the last promote stage ``promoted``, ``version`` and ``model`` (a path), which are None without
        one. Of a sweep the first 32 stages of each kind are told.
    """
    values = list(_values(state))
    promotions = [value for kind, _, value in values if kind == "promote"]
    promotion = promotions[-1] if promotions else {}
    return {
        "run_id": state.run_id,
        "storage": storage,
        "status": state.status.value,
        "seconds": _seconds(state),
        "scores": _few((name, _numbers(value.get("candidate"))) for kind, name, value in values if kind == "evaluate"),
        "rewards": _few(
            (name, last)
            for kind, name, value in values
            if kind == "verl" and (last := _numbers(value.get("reward")).get("last")) is not None
        ),
        "promoted": promotion.get("promoted"),
        "version": promotion.get("version"),
        "model": model.get("path") if isinstance(model := promotion.get("model"), Mapping) else None,
    }


def _values(state: RunState) -> Iterator[tuple[str, str, Mapping[str, Any]]]:
    """Kind, name and value of each stage that has returned an object."""
    for stage in outline_of(state).stages:
        if stage.kind in {"promote", "evaluate", "verl"} and stage.name in state.steps:
            try:
                value = state.steps[stage.name].value
            except VerlWorkflowError as error:
                if error.code is not ErrorCode.JOURNAL_DAMAGED:
                    raise
                # The run has succeeded all the same; what is lost is a number to show.
                continue
            if isinstance(value, Mapping):
                yield stage.kind, stage.name, value


def _numbers(value: Any) -> dict[str, int | float]:
    found = value if isinstance(value, Mapping) else {}
    return {str(name): number for name, number in found.items() if is_number(number)}


def _few(entries: Iterator[tuple[str, Any]]) -> dict[str, Any]:
    return dict(entry for entry, _ in zip(entries, range(_MOST_STAGES), strict=False))


def _seconds(state: RunState) -> float | None:
    if state.created_at is None or state.ended_at is None:
        return None
    return round(state.ended_at - state.created_at, 1)
