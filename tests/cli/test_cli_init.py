from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from verl_workflow.cli import app

FILES = {"pipeline.yaml", "reward.py", "questions.jsonl"}


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("VERL_WORKFLOW_STORAGE", raising=False)
    return tmp_path


def test_the_starter_is_valid_and_validating_it_writes_nothing(here: Path) -> None:
    made = CliRunner().invoke(app, ["init", "first"])
    assert made.exit_code == 0, made.output
    assert made.stdout.splitlines()[-1] == "next: cd first && verl-workflow run pipeline.yaml"
    assert {path.name for path in (here / "first").iterdir()} == FILES

    checked = CliRunner().invoke(app, ["validate", "first/pipeline.yaml", "-p", "steps=5", "--json"])
    assert checked.exit_code == 0, checked.output
    found = json.loads(checked.stdout)
    assert found["valid"] is True
    assert found["params"] == {"steps": 5}
    assert [stage["name"] for stage in found["stages"]] == ["prepare", "train", "evaluate", "promote"]
    written = {path.relative_to(here).as_posix() for path in here.rglob("*") if "__pycache__" not in path.parts}
    assert written == {"first", *(f"first/{name}" for name in FILES)}


def test_nothing_is_overwritten(here: Path) -> None:
    (here / "reward.py").write_text("mine")
    refused = CliRunner().invoke(app, ["init"])
    assert refused.exit_code == 2
    assert refused.stdout == ""
    assert refused.stderr.startswith("error: reward.py: the file exists and is left as it is. Choose another folder")
    assert [path.name for path in here.iterdir()] == ["reward.py"]
    assert (here / "reward.py").read_text() == "mine"


def test_a_folder_that_cannot_be_made_is_named(here: Path) -> None:
    (here / "file").write_text("")
    refused = CliRunner().invoke(app, ["init", "file/below", "--json"])
    assert refused.exit_code == 2
    assert json.loads(refused.stdout)["error"]["where"] == "file/below"


def test_the_starter_questions_are_distinct_and_the_reward_tells_them_apart(here: Path) -> None:
    CliRunner().invoke(app, ["init"])
    rows = [json.loads(line) for line in (here / "questions.jsonl").read_text().splitlines()]
    assert len({row["question"] for row in rows}) == len(rows) == 288
    scope: dict[str, object] = {}
    exec((here / "reward.py").read_text(), scope)
    score = scope["score"]
    assert callable(score)
    assert score("d", "1111", "1111") == {"score": 1.0, "acc": 1.0}
    assert score("d", "0000", "1111") == {"score": 0.2, "acc": 0.0}
    assert score("d", "", "1111")["score"] == score("d", "xyz", "1111")["score"] == 0.0
