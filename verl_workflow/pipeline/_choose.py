"""The choose stage: which member of a matrix is best, by a figure of each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from verl_workflow.errors import ErrorCode, UserError, VerlWorkflowError
from verl_workflow.pipeline._tolerance import failure_of
from verl_workflow.spec import ChooseStage, Pipeline
from verl_workflow.spec._fields import REFERENCE
from verl_workflow.stored_json import is_number


@dataclass(frozen=True, kw_only=True)
class _Candidate:
    """A member. Attributes: figure: None when it has none to reckon with. error: why it failed, if it did."""

    name: str
    values: Mapping[str, Any]
    result: Any
    figure: float | None
    error: str | None

    def to_json(self) -> dict[str, Any]:
        return {"member": self.name, "values": dict(self.values), "figure": self.figure, "error": self.error}


def choose(spec: ChooseStage, pipeline: Pipeline, values: Mapping[str, Any]) -> dict[str, Any]:
    """The outputs of the member with the best figure, and with them ``winner``, ``values``, ``figure`` and ``table``.

    Args:
        values: results of all members of the stage, and of the one that the figure is from.

    Returns:
        ``table`` has a mapping for each member, in order: ``member``, ``values``, ``figure`` (None when it is missing
        or no finite number; such a member never wins) and ``error`` (None unless the member failed). Of equal figures
        the first wins.

    Raises:
        UserError(SPEC_INVALID): no member has the figure.
        VerlWorkflowError(STEP_FAILED): every member has failed.
    """
    judged = REFERENCE.fullmatch(spec.by)
    stage, path = judged.groups() if judged is not None else (spec.of, spec.by)
    candidates = [
        _candidate(member, values[member.name], values[judge.name], path or "")
        for member, judge in zip(pipeline.members(spec.of), pipeline.members(stage), strict=True)
    ]
    ranked = [each for each in candidates if each.figure is not None]
    if not ranked:
        raise _nothing(spec, candidates, [values[judge.name] for judge in pipeline.members(stage)], path or "")
    sign = 1 if spec.mode == "max" else -1
    # Of equal figures `max` takes the first.
    best = max(ranked, key=lambda each: sign * (each.figure or 0.0))
    return {
        **best.result,
        "winner": best.name,
        "values": dict(best.values),
        "figure": best.figure,
        "table": [each.to_json() for each in candidates],
    }


def _candidate(member: Any, value: Any, judged: Any, path: str) -> _Candidate:
    failed = failure_of(value) or failure_of(judged)
    figure = None if failed is not None or not isinstance(value, Mapping) else _figure(judged, path)
    error = None if failed is None else str(failed.get("message", "it failed"))
    return _Candidate(name=member.name, values=member.member.values, result=value, figure=figure, error=error)


def _figure(value: Any, path: str) -> float | None:
    for part in path.split("."):
        value = value.get(part) if isinstance(value, Mapping) else None
    return value if is_number(value) else None


def _nothing(
    spec: ChooseStage, candidates: Sequence[_Candidate], judged: Sequence[Any], path: str
) -> VerlWorkflowError:
    failed = [each for each in candidates if each.error is not None]
    if len(failed) == len(candidates):
        return VerlWorkflowError(
            ErrorCode.STEP_FAILED,
            f"all {len(candidates)} members have failed, so that there is none to choose",
            where=spec.name,
            remedy=f"The first says: {failed[0].error}",
        )
    there = next(value for value, each in zip(judged, candidates, strict=True) if each.error is None)
    known = sorted(_numbers(there, ""))
    return UserError(
        ErrorCode.SPEC_INVALID,
        f"no member has a finite number at {path}",
        where=f"{spec.name}.by",
        value=spec.by,
        remedy=f"Figures of the first member: {', '.join(known) or 'none'}.",
    )


def _numbers(value: Any, above: str) -> list[str]:
    if not isinstance(value, Mapping):
        return [above] if is_number(value) else []
    if "sha256" in value:
        return []
    return [name for key, item in value.items() for name in _numbers(item, f"{above}.{key}" if above else str(key))]
