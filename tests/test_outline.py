from __future__ import annotations

from typing import Any

import pytest

from verl_workflow.errors import ErrorCode, VerlWorkflowError
from verl_workflow.outline import outline_of
from verl_workflow.workflow import RunState, RunStatus

STAGE = {"name": "train", "kind": "verl", "model": "${model}"}


def outline(definition: Any) -> Any:
    return outline_of(RunState(run_id="r1", status=RunStatus.PENDING, definition=definition))


def test_the_outline_of_a_pipeline() -> None:
    found = outline({"pipeline": {"name": "sums", "stages": [STAGE]}, "artifacts": "/shared"})
    assert (found.pipeline, found.artifacts) == ("sums", "/shared")
    assert [(stage.name, stage.kind, stage.fields) for stage in found.stages] == [("train", "verl", STAGE)]


@pytest.mark.parametrize(
    ("definition", "wrong"),
    [
        ({}, "its pipeline is None"),
        ({"pipeline": "x"}, "its pipeline is 'x'"),
        ({"pipeline": {"stages": []}}, "name of its pipeline"),
        ({"pipeline": {"name": "sums"}}, "stages of its pipeline"),
        ({"pipeline": {"name": "sums", "stages": {"a": 1}}}, "stages of its pipeline"),
        ({"pipeline": {"name": "sums", "stages": [{}]}}, "a stage without name and kind"),
        ({"pipeline": {"name": "sums", "stages": [STAGE, 5]}}, "a stage without name and kind"),
        ({"pipeline": {"name": "sums", "stages": []}, "artifacts": 5}, "its artifacts is 5"),
        ({"pipeline": {"name": "sums", "stages": []}, "artifacts": "a\0b"}, "its artifacts is"),
    ],
)
def test_a_definition_of_no_pipeline_is_damaged_and_says_where(definition: Any, wrong: str) -> None:
    with pytest.raises(VerlWorkflowError, match=wrong) as caught:
        outline(definition)
    assert caught.value.code is ErrorCode.JOURNAL_DAMAGED
    assert caught.value.where == "runs/r1/definition.json"
