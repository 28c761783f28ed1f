from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from verl_workflow.artifacts import Artifact
from verl_workflow.errors import ErrorCode, UserError, VerlWorkflowError
from verl_workflow.evaluation import run_evaluate_stage
from verl_workflow.registry import Lineage, Registry
from verl_workflow.storage import Store

Make = Callable[..., Any]
TRUTHS = ["7", "3", "7", "7", "1"]


def crown(ctx: Any, folder: Path, run: str, number: int | None = None) -> str:
    registry = Registry(Store(ctx.storage), ctx.root, check=lambda source, copy: None)
    version = registry.register("digits", Artifact.of(folder), Lineage(run=run, stage="promote")).version
    registry.set_alias("digits", "champion", version, number)
    return version


def table(outputs: Any) -> list[dict[str, Any]]:
    import pyarrow.parquet

    Artifact.from_json(outputs["results"]).verify()
    found: list[dict[str, Any]] = pyarrow.parquet.read_table(outputs["results"]["path"]).to_pylist()
    return found


def test_candidate_and_champion_answer_the_same_rows(says: Make, rows: Make, context: Make, stage: Make) -> None:
    reports: list[Any] = []
    ctx = context(report=reports.append)
    version = crown(ctx, says("3"), "sunday")
    candidate, data = says("7"), rows(TRUTHS)
    outputs = run_evaluate_stage(stage(candidate, data, champion="digits", kwargs={"worth": 2.0}), ctx)

    json.dumps(outputs, allow_nan=False)
    assert outputs["model"] == outputs["candidate"]["artifact"] == Artifact.of(candidate).to_json()
    figures = {name: outputs["candidate"][name] for name in ("score", "acc", "rows", "place")}
    assert figures == {"score": 1.2, "acc": 0.6, "rows": 5, "place": 2.0}
    champion = outputs["champion"]
    assert (champion["version"], champion["registry"], champion["acc"]) == (version, "digits", 0.2)
    assert "said" not in champion
    assert outputs["rows"] == 5
    assert outputs["difference"]["mean"] == pytest.approx(0.8)
    assert outputs["data"] == Artifact.of(data).to_json()

    lines = table(outputs)
    assert [line["row"] for line in lines] == [0, 1, 2, 3, 4]
    assert [line["ground_truth"] for line in lines] == TRUTHS
    assert [line["candidate_answer"] for line in lines] == ["7"] * 5
    assert [line["champion_answer"] for line in lines] == ["3"] * 5
    assert [line["candidate_score"] for line in lines] == [2.0, 0.0, 2.0, 2.0, 0.0]
    assert [line["champion_score"] for line in lines] == [0.0, 2.0, 0.0, 0.0, 0.0]
    assert [line["candidate_said"] for line in lines] == ["7"] * 5
    assert lines[2]["prompt"] == "<|im_start|>user\nquestion !!<|im_end|>\n<|im_start|>assistant\n"
    assert [(line["candidate_tokens"], line["candidate_finished"]) for line in lines] == [(1, False)] * 5
    assert [(report["rows_done"], report["rows"]) for report in reports] == [
        (done, 10) for done in (0, 2, 4, 5, 7, 9, 10)
    ]


def test_answers_do_not_depend_on_the_size_of_a_batch(rows: Make, context: Make, stage: Make, tmp_path: Path) -> None:
    from verl_workflow.models._tiny import write_tiny

    write_tiny(tmp_path / "tiny")
    data = rows(TRUTHS)
    answers = []
    for attempt, size in enumerate((1, 2, 5, 32), start=1):
        spec = stage(tmp_path / "tiny", data, "plain", batch_size=size, max_response_length=12)
        lines = table(run_evaluate_stage(spec, context(attempt=attempt)))
        answers.append([line["candidate_answer"] for line in lines])
    assert answers[0] == answers[1] == answers[2] == answers[3]
    assert any(answers[0])


def test_without_a_champion_the_candidate_stands_alone(says: Make, rows: Make, context: Make, stage: Make) -> None:
    for attempt, name in enumerate((None, "digits"), start=1):
        outputs = run_evaluate_stage(stage(says("7"), rows(TRUTHS), champion=name), context(attempt=attempt))
        assert (outputs["champion"], outputs["difference"]) == (None, None)
        assert {line["champion_answer"] for line in table(outputs)} == {None}


def test_limit_takes_rows_from_the_start(says: Make, rows: Make, context: Make, stage: Make) -> None:
    outputs = run_evaluate_stage(stage(says("7"), rows(TRUTHS), limit=3), context())
    assert [line["ground_truth"] for line in table(outputs)] == TRUTHS[:3]
    assert outputs["candidate"]["score"] == pytest.approx(2 / 3)


def test_a_retry_meets_the_champion_the_first_attempt_met(says: Make, rows: Make, context: Make, stage: Make) -> None:
    ctx = context()
    first = crown(ctx, says("3"), "sunday")
    spec = stage(says("7"), rows(TRUTHS), "raises", champion="digits")
    with pytest.raises(UserError):
        run_evaluate_stage(spec, ctx)
    crown(ctx, says("1"), "meanwhile", 1)
    retried = run_evaluate_stage(stage(says("7"), rows(TRUTHS), champion="digits"), context(attempt=2, epoch=2))
    assert retried["champion"]["version"] == first
    fresh = run_evaluate_stage(stage(says("7"), rows(TRUTHS), champion="digits"), context(run_id="tuesday"))
    assert fresh["champion"]["version"] != first


def test_no_champion_stays_none_on_a_retry(says: Make, rows: Make, context: Make, stage: Make) -> None:
    spec = stage(says("7"), rows(TRUTHS), champion="digits")
    assert run_evaluate_stage(spec, context())["champion"] is None
    crown(context(), says("3"), "meanwhile")
    assert run_evaluate_stage(spec, context(attempt=2))["champion"] is None


def test_the_next_run_of_an_id_meets_a_champion_of_its_own(says: Make, rows: Make, context: Make, stage: Make) -> None:
    spec = stage(says("7"), rows(TRUTHS), champion="digits")
    assert run_evaluate_stage(spec, context())["champion"] is None
    version = crown(context(), says("3"), "meanwhile")
    later = run_evaluate_stage(spec, context(records="runs/monday/fedcba9876543210", attempt=2))
    assert later["champion"]["version"] == version


def test_a_candidate_that_is_the_champion_answers_once(says: Make, rows: Make, context: Make, stage: Make) -> None:
    reports: list[Any] = []
    ctx = context(report=reports.append)
    candidate = says("7")
    crown(ctx, candidate, "sunday")
    outputs = run_evaluate_stage(stage(candidate, rows(TRUTHS), champion="digits"), ctx)
    assert outputs["champion"]["score"] == outputs["candidate"]["score"] == 0.6
    assert outputs["difference"] == {"mean": 0.0, "low": 0.0, "high": 0.0}
    assert reports[-1] == {"rows_done": 5, "rows": 5}
    assert [line["champion_answer"] for line in table(outputs)] == ["7"] * 5


def test_a_damaged_champion_is_told(says: Make, rows: Make, context: Make, stage: Make) -> None:
    ctx = context()
    version = crown(ctx, says("3"), "sunday")
    path = Registry(Store(ctx.storage), ctx.root).resolve("digits", version).path
    (path / "model.safetensors").write_bytes(b"")
    with pytest.raises(VerlWorkflowError, match=r"model\.safetensors has changed") as caught:
        run_evaluate_stage(stage(says("7"), rows(TRUTHS), champion="digits"), ctx)
    assert caught.value.code is ErrorCode.MODEL_INVALID


def test_async_rewards_run_together_and_keep_their_rows(says: Make, rows: Make, context: Make, stage: Make) -> None:
    outputs = run_evaluate_stage(stage(says("7"), rows(TRUTHS), "right_later", batch_size=5), context())
    assert [line["candidate_score"] for line in table(outputs)] == [1.0, 0.0, 1.0, 1.0, 0.0]


@pytest.mark.parametrize(
    ("reward", "told"),
    [
        ("raises", "raised ZeroDivisionError"),
        ("raises_later", "raised ZeroDivisionError"),
        ("infinite", "score is not finite"),
        ("nan_beside", "acc is not finite"),
        ("no_score", "without 'score'"),
        ("text", "score is no number"),
        ("reserved", "key 'rows' is a figure of the evaluation"),
    ],
)
def test_a_reward_that_breaks_its_contract_names_the_row(
    says: Make, rows: Make, context: Make, stage: Make, reward: str, told: str
) -> None:
    ctx = context()
    with pytest.raises(UserError, match=told) as caught:
        run_evaluate_stage(stage(says("7"), rows(TRUTHS), reward), ctx)
    assert caught.value.code is ErrorCode.REWARD_INVALID
    assert "row 3 (data_source 'digits', ground_truth '7', answer '7')" in str(caught.value)
    assert not list(ctx.attempt_dir.iterdir())


def test_a_prompt_that_is_too_long_is_named_and_not_cut(says: Make, rows: Make, context: Make, stage: Make) -> None:
    with pytest.raises(UserError, match="row 3: the prompt has 31 tokens, and max_prompt_length is 30, and 1 more"):
        run_evaluate_stage(stage(says("7"), rows(TRUTHS), max_prompt_length=30), context())
    run_evaluate_stage(stage(says("7"), rows(TRUTHS), max_prompt_length=32), context(attempt=2))


@pytest.mark.parametrize(
    ("columns", "told"),
    [
        ({"prompt": None}, "no column 'prompt'"),
        ({"prompt": ["question"] * 5}, "row 0: prompt is not a chat"),
        ({"prompt": [[{"role": "user", "content": None}]] * 5}, "content is not text"),
        ({"reward_model": [{"style": "rule", "ground_truth": t} for t in ["7", "3", None, "7", "1"]]}, "row 2"),
    ],
)
def test_rows_that_are_not_in_the_schema_are_named(
    says: Make, rows: Make, context: Make, stage: Make, columns: dict[str, Any], told: str
) -> None:
    with pytest.raises(UserError, match=told) as caught:
        run_evaluate_stage(stage(says("7"), rows(TRUTHS, **columns)), context())
    assert caught.value.code is ErrorCode.DATA_INVALID


def test_no_rows_and_no_parquet_are_errors(says: Make, rows: Make, context: Make, stage: Make, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="has no rows"):
        run_evaluate_stage(stage(says("7"), rows([])), context())
    (tmp_path / "text.parquet").write_text("no parquet")
    with pytest.raises(UserError, match="cannot be read as parquet"):
        run_evaluate_stage(stage(says("7"), tmp_path / "text.parquet"), context(attempt=2))


def test_inputs_must_be_what_was_recorded(says: Make, rows: Make, context: Make, stage: Make) -> None:
    data = rows(TRUTHS)
    recorded = {"prepare": {"validation": {**Artifact.of(data).to_json(), "rows": 5}}}
    spec = stage(says("7"), Path("${prepare.validation}"))
    assert run_evaluate_stage(spec, context(inputs=recorded))["rows"] == 5
    rows(["1"])
    with pytest.raises(VerlWorkflowError, match="has changed"):
        run_evaluate_stage(spec, context(inputs=recorded, attempt=2))
