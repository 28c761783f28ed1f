from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from verl_workflow.errors import ErrorCode, UserError, UserErrors, VerlWorkflowError
from verl_workflow.pipeline import Definition, define
from verl_workflow.spec import load


def test_a_definition_survives_json(project: Path, tmp_path: Path) -> None:
    definition = define(load(project / "pipeline.yaml", {"count": "7"}), storage=str(tmp_path / "s"))
    assert Definition.from_json(json.loads(json.dumps(definition.to_json()))) == definition
    assert definition.params == {"count": 7}
    assert set(definition.code_files) == {"steps.py", "sums.py"}


def test_defining_writes_nothing(project: Path, tmp_path: Path) -> None:
    before = sorted(tmp_path.rglob("*"))
    define(load(project / "pipeline.yaml", {}), storage=str(tmp_path / "s"))
    assert sorted(path for path in tmp_path.rglob("*") if "__pycache__" not in path.parts) == before


@pytest.mark.parametrize("run_id", ["../x", "", "a/b", "x" * 200, ".hidden"])
def test_a_run_id_that_could_leave_the_storage_is_refused(project: Path, run_id: str, tmp_path: Path) -> None:
    with pytest.raises(UserError) as caught:
        define(load(project / "pipeline.yaml", {}), run_id=run_id, storage=str(tmp_path / "s"))
    assert caught.value.code is ErrorCode.RUN_ID_INVALID


def test_an_object_store_needs_a_folder_for_files(project: Path) -> None:
    with pytest.raises(UserErrors, match=r"storage\.artifacts"):
        define(load(project / "pipeline.yaml", {}), storage="s3://bucket/prefix")


def test_a_definition_of_another_format_is_refused(project: Path, tmp_path: Path) -> None:
    stored = define(load(project / "pipeline.yaml", {}), storage=str(tmp_path / "s")).to_json()
    with pytest.raises(UserError, match="format 99"):
        Definition.from_json({**stored, "format": 99})


def test_what_verl_would_refuse_is_named_with_its_place(project: Path, tmp_path: Path) -> None:
    (project / "reward.py").write_text(
        "def score(data_source, solution_str, ground_truth, extra_info=None):\n    return 1.0\n"
    )
    (project / "rows.parquet").write_bytes(b"")
    (project / "verl.yaml").write_text(
        """\
version: 1
name: broken
model: {builtin: tiny}
stages:
  train:
    kind: verl
    train: rows.parquet
    validation: rows.parquet
    reward: {function: "reward.py:score"}
    steps: 2
    batch_size: 4
    save_every: 1
    overrides:
      trainer.max_ckpt_to_keep: 2
"""
    )
    with pytest.raises(UserErrors) as caught:
        define(load(project / "verl.yaml", {}), storage=str(tmp_path / "s"))
    message = str(caught.value)
    assert "verl.yaml:14:7" in message
    assert "max_ckpt_to_keep" in message
    assert "max_actor_ckpt_to_keep" in message


def test_a_batch_that_the_data_cannot_fill_is_told_before_anything_runs(project: Path, tmp_path: Path) -> None:
    (project / "reward.py").write_text(
        "def score(data_source, solution_str, ground_truth, extra_info=None):\n    return 1.0\n"
    )
    (project / "rows.jsonl").write_text("".join(f'{{"question": "{n}", "answer": "x"}}\n' for n in range(10)))
    (project / "small.yaml").write_text(
        """\
version: 1
name: small
model: {builtin: tiny}
stages:
  prepare:
    kind: data
    source: {jsonl: rows.jsonl}
    prompt: "{{ question }}"
    answer: answer
    validation: 4
  train:
    kind: verl
    train: ${prepare.train}
    validation: ${prepare.validation}
    reward: {function: "reward.py:score"}
    steps: 2
    batch_size: 8
    save_every: 1
"""
    )
    with pytest.raises(UserErrors) as caught:
        define(load(project / "small.yaml"), storage=str(tmp_path / "s"))
    (error,) = caught.value.errors
    assert error.code is ErrorCode.DATA_INVALID
    assert "small.yaml:17:" in error.where
    assert "6 rows at most, fewer than one batch (got 8)" in str(error)


@pytest.mark.parametrize("change", [{"pipeline": "x"}, {"pipeline": {"stages": [{}]}}, {"base_dir": 5}, {"more": 1}])
def test_a_definition_that_is_not_as_it_was_written_is_damaged(
    project: Path, tmp_path: Path, change: dict[str, Any]
) -> None:
    definition = define(load(project / "pipeline.yaml", {}), run_id="r1", storage=str(tmp_path / "s"))
    with pytest.raises(VerlWorkflowError, match=r"runs/r1/definition\.json") as caught:
        Definition.from_json({**definition.to_json(), **change})
    assert caught.value.code is ErrorCode.JOURNAL_DAMAGED
