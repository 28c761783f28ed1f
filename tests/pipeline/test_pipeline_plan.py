"""What `plan` foresees, on runs whose stages return what they are told."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from verl_workflow.artifacts import Artifact
from verl_workflow.pipeline import _definition, define, plan
from verl_workflow.pipeline._compile import compile_plan
from verl_workflow.spec import load
from verl_workflow.storage import Store
from verl_workflow.workflow import Driver, InlineLauncher, Plan, create_run
from verl_workflow.workflow._definition import run_key

PIPELINE = """
version: 1
name: reading
stages:
  questions:
    kind: python
    function: "steps.py:questions"
  prepare:
    kind: data
    source: {jsonl: "${questions.file}"}
    prompt: "{{ question }}"
    validation: 1
  again:
    kind: data
    source: {parquet: "${prepare.train}"}
    validation: 1
"""


@pytest.fixture
def project(tmp_path: Path) -> Path:
    folder = tmp_path / "project"
    folder.mkdir()
    (folder / "steps.py").write_text("def questions():\n    return {}\n")
    (folder / "pipeline.yaml").write_text(PIPELINE)
    return folder / "pipeline.yaml"


@pytest.fixture
def storage(tmp_path: Path) -> str:
    return str(tmp_path / "storage")


def artifact(folder: Path, name: str, content: str) -> Mapping[str, Any]:
    (folder / name).write_text(content)
    return Artifact.of(folder / name).to_json()


def finish(project: Path, storage: str, values: Mapping[str, Any], run_id: str = "night-1") -> None:
    """A run of the pipeline whose stages yielded those values."""
    definition = define(load(project), run_id=run_id, storage=storage)
    store = Store(storage)
    create_run(store, run_id, definition.to_json())
    steps = tuple(
        replace(step, call=lambda _, value=values[step.name]: value) for step in compile_plan(definition).steps
    )
    Driver(store=store, run_id=run_id, plan=Plan(steps=steps), launcher=InlineLauncher()).run()


def foreseen(project: Path, storage: str) -> dict[str, tuple[str, str]]:
    return {row.stage: (row.action, row.why) for row in plan(load(project), storage=storage).rows}


@pytest.fixture
def values(tmp_path: Path) -> dict[str, Any]:
    return {
        "questions": {"file": artifact(tmp_path, "questions.jsonl", "{}")},
        "prepare": {"train": artifact(tmp_path, "train.parquet", "rows")},
        "again": {},
    }


def test_before_the_first_run_nothing_is_known_of_what_depends_on_a_function(project: Path, storage: str) -> None:
    rows = foreseen(project, storage)
    assert rows["questions"][0] == "run"
    assert rows["prepare"] == ("unknown", "depends on what questions will yield")
    assert not Path(storage).exists()


def test_what_a_function_yielded_last_time_is_assumed_and_said(
    project: Path, storage: str, values: dict[str, Any]
) -> None:
    finish(project, storage, values)
    rows = foreseen(project, storage)
    assert rows["questions"][0] == "run"
    for stage in ("prepare", "again"):
        assert rows[stage] == ("unknown", "re-used from night-1 if it gets the same from questions as in night-1")


def test_a_changed_stage_runs_and_those_behind_it_are_unknown(
    project: Path, storage: str, values: dict[str, Any]
) -> None:
    finish(project, storage, values)
    project.write_text(PIPELINE.replace('"{{ question }}"', '"{{ question }} Be brief."'))
    rows = foreseen(project, storage)
    assert rows["prepare"] == (
        "run",
        "no earlier result with the same spec, inputs, code and tool versions; "
        "different from night-1: prompt {{ question }} -> {{ question }} Be brief.",
    )
    assert rows["again"] == ("unknown", "depends on what prepare will yield")


def what_changed(project: Path, storage: str) -> str:
    action, why = foreseen(project, storage)["prepare"]
    assert action == "run"
    return why.partition("different from night-1: ")[2]


def test_each_kind_of_change_is_named(project: Path, storage: str, values: dict[str, Any]) -> None:
    finish(project, storage, values)
    (project.parent / "steps.py").write_text("def questions():\n    return {'a': 1}\n")
    assert what_changed(project, storage) == "steps.py changed"
    (project.parent / "more.py").touch()
    project.write_text(
        PIPELINE.replace(
            "validation: 1\n  again", "validation: 2\n    answer: a\n    system: s\n    retry: {attempts: 9}\n  again"
        )
        + "code: [more.py]\n"
    )
    assert (
        what_changed(project, storage)
        == "validation 1 -> 2, answer none -> a, system none -> s, steps.py changed, 1 more"
    )


def test_versions_and_inputs_that_differ_are_named(
    project: Path, storage: str, values: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    write_rows(project, 3)
    finish(project, storage, values)
    write_rows(project, 4)
    assert what_changed(project, storage) == "something that its settings or inputs refer to"
    versions = {**_definition.tool_versions(), "verl": "0.0.1"}
    monkeypatch.setattr(_definition, "tool_versions", lambda: versions)
    assert what_changed(project, storage).startswith("verl ")
    assert what_changed(project, storage).endswith(" -> 0.0.1")


def test_a_result_that_has_been_damaged_is_made_again(
    project: Path, storage: str, values: dict[str, Any], tmp_path: Path
) -> None:
    finish(project, storage, values)
    (tmp_path / "train.parquet").write_text("other")
    action, why = foreseen(project, storage)["prepare"]
    assert action == "run"
    assert why.startswith("the earlier result of night-1 is not usable")


def write_rows(project: Path, count: int) -> None:
    """Questions in a file beside the pipeline, which is then what `prepare` reads."""
    (project.parent / "rows.jsonl").write_text(
        "".join(f'{{"question": "{n}+1", "reward_model": {{"ground_truth": "{n + 1}"}}}}\n' for n in range(count))
    )
    project.write_text(PIPELINE.replace("${questions.file}", "rows.jsonl"))


def test_what_depends_on_nothing_unknown_is_re_used(project: Path, storage: str, values: dict[str, Any]) -> None:
    write_rows(project, 3)
    finish(project, storage, values)
    rows = foreseen(project, storage)
    for stage in ("prepare", "again"):
        assert rows[stage] == ("reuse", "same spec, inputs, code and tool versions as in night-1")


@pytest.mark.parametrize(
    "entry",
    [
        b"",
        b"[]",
        b"{}",
        b"x",
        b"[" * 100_000,
        b'{"run_id": 5, "value": 1}',
        b'{"run_id": "night-1", "value": {"train": {"path": 5, "sha256": "", "bytes": 1}}}',
    ],
)
def test_an_earlier_result_that_cannot_be_read_is_made_again_and_said(
    project: Path, storage: str, values: dict[str, Any], entry: bytes
) -> None:
    finish(project, storage, values)
    store = Store(storage)
    for key in store.list("cache"):
        store.put(key, entry)
    action, why = foreseen(project, storage)["prepare"]
    assert action == "run"
    assert "is not usable" in why


@pytest.mark.parametrize("definition", [{}, {"pipeline": "x"}, {"pipeline": {"stages": []}}])
def test_a_run_of_no_pipeline_does_not_keep_a_plan_from_being_made(
    project: Path, storage: str, values: dict[str, Any], definition: dict[str, Any]
) -> None:
    finish(project, storage, values)
    create_run(Store(storage), "other", definition)
    Driver(store=Store(storage), run_id="other", plan=Plan(steps=()), launcher=InlineLauncher()).run()
    assert foreseen(project, storage)["prepare"][0] == "unknown"


def test_a_last_value_that_is_gone_is_not_assumed(project: Path, storage: str, values: dict[str, Any]) -> None:
    finish(project, storage, values)
    store = Store(storage)
    for key in store.list(f"{run_key(store, 'night-1').folder}/values"):
        store.delete(key)
    assert foreseen(project, storage)["prepare"] == ("unknown", "depends on what questions will yield")


def test_an_earlier_result_of_another_shape_does_not_keep_a_plan_from_being_made(
    project: Path, storage: str, values: dict[str, Any]
) -> None:
    finish(project, storage, values)
    store = Store(storage)
    for key in store.list("cache"):
        store.put(key, b'{"run_id": "night-1", "value": 5}')
    action, why = foreseen(project, storage)["again"]
    assert action == "run"
    assert why.startswith("what prepare yielded lacks what the stage refers to")
