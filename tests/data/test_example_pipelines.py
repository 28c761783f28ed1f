"""The data of the pipelines that are shipped, made for real, and their rewards."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from verl_workflow import code
from verl_workflow.artifacts import Artifact
from verl_workflow.data import run_data_stage
from verl_workflow.pipeline import StageContext
from verl_workflow.spec import load

PIPELINES = Path(__file__).parents[2] / "pipelines"


def context(tmp_path: Path, stage: str, inputs: dict[str, Any]) -> StageContext:
    made = StageContext(
        run_id="r",
        stage=stage,
        attempt=1,
        epoch=1,
        storage=str(tmp_path),
        records="runs/r/0123456789abcdef",
        root=tmp_path,
        code_dir=PIPELINES,
        inputs=inputs,
    )
    made.attempt_dir.mkdir(parents=True)
    return made


@pytest.mark.usefixtures("ray_cluster")
def test_the_quick_starts_questions_are_split_and_pass_its_reward(tmp_path: Path) -> None:
    pipeline = load(PIPELINES / "quickstart.yaml", None).pipeline
    write = code.load_function(pipeline.stage("questions").function, PIPELINES)
    questions = write(context=context(tmp_path, "questions", {}))
    Artifact.from_json(questions["questions"]).verify()
    prepare = pipeline.stage("prepare")
    output = run_data_stage(prepare, context(tmp_path, "prepare", {"questions": questions}))
    assert output["rows"] == {"train": 320, "validation": 64, "rejected": 0}
    answers = [row["ground_truth"] for row in pq.read_table(output["validation"]["path"])["reward_model"].to_pylist()]
    assert 16 < answers.count("1111") < 48, "one answer for all would not do"


@pytest.mark.usefixtures("ray_cluster")
def test_the_arithmetic_questions_are_split_and_pass_their_reward(tmp_path: Path) -> None:
    prepare = load(PIPELINES / "smollm2-arithmetic.yaml", None).pipeline.stage("prepare")
    output = run_data_stage(prepare, context(tmp_path, "prepare", {}))
    assert output["rows"] == {"train": 128, "validation": 64, "rejected": 0}


@pytest.mark.parametrize(
    ("reply", "score", "acc"),
    [("1111", 1.0, 1.0), ("11", 1.0, 0.0), ("1100", 0.6, 0.0), ("abcd", 0.0, 0.0), ("", 0.0, 0.0), ("1aaa", 0.25, 0.0)],
)
def test_the_quick_starts_reward_gives_credit_for_each_right_bit(reply: str, score: float, acc: float) -> None:
    function = code.load_function("quickstart/task.py:score", PIPELINES)
    assert function("repeat_bits", reply, "1111") == {"score": pytest.approx(score), "acc": acc}


@pytest.mark.parametrize(
    ("reply", "right"),
    [("12", 1.0), (" 12. ", 1.0), ("5 + 7 = 12", 1.0), ("12 - 5 = 7", 0.0), ("11", 0.0), ("dozen", 0.0)],
)
def test_the_arithmetic_reward_wants_the_last_number(reply: str, right: float) -> None:
    result = code.load_function("smollm2/reward.py:score", PIPELINES)("chain_sum", reply, "12")
    assert result == {"score": right, "acc": right}
