"""The identity of a stage over runs, and the graph that a pipeline becomes."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from verl_workflow.artifacts import Artifact
from verl_workflow.errors import UserError
from verl_workflow.pipeline import define
from verl_workflow.pipeline._compile import compile_plan, verify_artifacts
from verl_workflow.spec import load

PIPELINE = """
version: 1
name: reading
stages:
  prepare:
    kind: data
    source: {jsonl: rows.jsonl}
    prompt: "{{ question }}"
    answer: answer
    validation: 1
    reward: {function: "reward.py:score"}
  again:
    kind: data
    source: {parquet: "${prepare.train}"}
    validation: 1
"""
EVALUATION = """\
  evaluate:
    kind: evaluate
    model: ${model}
    data: ${prepare.validation}
    reward: {function: "reward.py:score"}
model: {builtin: tiny}
"""
ROWS = "".join(f'{{"question": "{n}+1", "answer": "{n + 1}"}}\n' for n in range(4))
REWARD = "def score(data_source, solution_str, ground_truth, extra_info=None):\n    return 1.0\n"


@pytest.fixture
def reading(tmp_path: Path) -> Path:
    folder = tmp_path / "reading"
    folder.mkdir()
    (folder / "pipeline.yaml").write_text(PIPELINE)
    (folder / "reward.py").write_text(REWARD)
    (folder / "rows.jsonl").write_text(ROWS)
    return folder


def key(folder: Path, storage: Path, stage: str = "prepare", inputs: dict[str, object] | None = None) -> str:
    plan = compile_plan(define(load(folder / "pipeline.yaml"), storage=str(storage)))
    step = next(step for step in plan.steps if step.name == stage)
    assert step.key is not None
    return step.key(inputs or {})


def test_a_key_does_not_depend_on_places(reading: Path, tmp_path: Path) -> None:
    before = key(reading, tmp_path / "here")
    shutil.copytree(reading, tmp_path / "moved")
    assert key(tmp_path / "moved", tmp_path / "there") == before


@pytest.mark.parametrize(
    ("file", "text"),
    [
        ("rows.jsonl", ROWS.replace('"4"', '"5"')),
        ("reward.py", REWARD.replace("1.0", "0.5")),
        ("pipeline.yaml", PIPELINE.replace("validation: 1", "validation: 2", 1)),
    ],
)
def test_a_key_changes_with_what_shapes_the_result(reading: Path, tmp_path: Path, file: str, text: str) -> None:
    before = key(reading, tmp_path / "storage")
    (reading / file).write_text(text)
    assert key(reading, tmp_path / "storage") != before


def test_a_key_follows_the_content_of_its_inputs(reading: Path, tmp_path: Path) -> None:
    def value(path: str, sha256: str) -> dict[str, object]:
        return {"prepare": {"train": {"path": path, "sha256": sha256, "bytes": 1}}}

    first = key(reading, tmp_path / "s", "again", value("/a/train.parquet", "1" * 64))
    assert key(reading, tmp_path / "s", "again", value("/b/train.parquet", "1" * 64)) == first
    assert key(reading, tmp_path / "s", "again", value("/a/train.parquet", "2" * 64)) != first


def test_a_fresh_run_reuses_nothing(reading: Path, tmp_path: Path) -> None:
    plan = compile_plan(define(load(reading / "pipeline.yaml"), storage=str(tmp_path / "s"), reuse=False))
    assert [step.key for step in plan.steps] == [None, None]


def test_stages_wait_for_what_they_refer_to(reading: Path, tmp_path: Path) -> None:
    plan = compile_plan(define(load(reading / "pipeline.yaml"), storage=str(tmp_path / "s")))
    assert {step.name: step.after for step in plan.steps} == {"prepare": (), "again": ("prepare",)}


def test_an_evaluation_takes_a_gpu_where_there_is_one(reading: Path, tmp_path: Path) -> None:
    (reading / "pipeline.yaml").write_text(PIPELINE + EVALUATION)
    definition = define(load(reading / "pipeline.yaml"), storage=str(tmp_path / "s"))

    def gpus(there: bool) -> dict[str, float]:
        return {step.name: step.num_gpus for step in compile_plan(definition, gpus=there).steps}

    assert gpus(True) == {"model": 0.0, "prepare": 0.0, "again": 0.0, "evaluate": 1.0}
    assert set(gpus(False).values()) == {0.0}


def test_a_result_whose_file_has_changed_is_not_reused(tmp_path: Path) -> None:
    file = tmp_path / "train.parquet"
    file.write_bytes(b"rows")
    value = {"train": json.loads(json.dumps(Artifact.of(file).to_json())), "rows": [{"n": 1}]}
    verify_artifacts(value)
    file.write_bytes(b"other rows")
    with pytest.raises(Exception, match="has changed") as caught:
        verify_artifacts(value)
    assert not isinstance(caught.value, UserError)
