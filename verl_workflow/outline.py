"""The pipeline of a run as far as those need it that only tell about runs."""

from __future__ import annotations

import reprlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from verl_workflow.workflow import damaged

if TYPE_CHECKING:
    from verl_workflow.workflow import RunState


@dataclass(frozen=True, kw_only=True)
class StageOutline:
    """One stage. `fields` are all it was defined with, as plain JSON whose types nobody has checked."""

    name: str
    kind: str
    fields: Mapping[str, Any]

    @property
    def values(self) -> Mapping[str, Any]:
        """The combination of a matrix that a member stands for; empty for any other stage."""
        member = self.fields.get("member")
        values = member.get("values") if isinstance(member, Mapping) else None
        return values if isinstance(values, Mapping) else {}


@dataclass(frozen=True, kw_only=True)
class Outline:
    """A pipeline's name, its stages in order, and the folder of the run's bulk data, empty when none is named."""

    pipeline: str
    stages: tuple[StageOutline, ...]
    artifacts: str


def outline_of(state: RunState) -> Outline:
    """The outline of a run that `read_run` has read; a workflow has no stages, and ``(workflow)`` for a name.

    Raises:
        VerlWorkflowError(JOURNAL_DAMAGED): the definition is none of a pipeline; says what is wrong with it.
    """
    key = f"runs/{state.run_id}/definition.json"
    if "workflow" in state.definition:
        return Outline(pipeline="(workflow)", stages=(), artifacts="")
    pipeline = state.definition.get("pipeline")
    if not isinstance(pipeline, Mapping):
        raise damaged(key, f"its pipeline is {reprlib.repr(pipeline)}")
    name, stages = pipeline.get("name"), pipeline.get("stages")
    if not isinstance(name, str):
        raise damaged(key, f"the name of its pipeline is {reprlib.repr(name)}")
    if not isinstance(stages, list):
        raise damaged(key, f"the stages of its pipeline are {reprlib.repr(stages)}")
    artifacts = state.definition.get("artifacts", "")
    if not isinstance(artifacts, str) or "\0" in artifacts:
        raise damaged(key, f"its artifacts is {reprlib.repr(artifacts)}, not the path of a folder")
    return Outline(pipeline=name, stages=tuple(_stage(stage, key) for stage in stages), artifacts=artifacts)


def _stage(stage: Any, key: str) -> StageOutline:
    if not isinstance(stage, Mapping) or not all(isinstance(stage.get(name), str) for name in ("name", "kind")):
        raise damaged(key, f"a stage without name and kind is in its pipeline: {reprlib.repr(stage)}")
    return StageOutline(name=stage["name"], kind=stage["kind"], fields=stage)
