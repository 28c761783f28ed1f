from __future__ import annotations

from dataclasses import replace

from verl_workflow.cli._facts import RunFacts, StageFacts
from verl_workflow.cli._summary import advice, summary

PREPARE = StageFacts(
    name="prepare",
    kind="data",
    status="succeeded",
    attempt=1,
    elapsed=7.0,
    value={
        "train": {},
        "validation": {},
        "rejected": {"path": "/s/rejected.jsonl", "rows": 3},
        "rows": {"train": 80, "validation": 20, "rejected": 3},
    },
)
TRAIN = StageFacts(
    name="train",
    kind="verl",
    status="succeeded",
    attempt=2,
    elapsed=130.0,
    value={"step": 40, "reward": {"first": 0.05, "last": 0.93, "best": 0.951}},
)
EVALUATE = StageFacts(
    name="evaluate",
    kind="evaluate",
    status="succeeded",
    attempt=1,
    reused_from=None,
    elapsed=4.0,
    value={
        "rows": 20,
        "candidate": {"score": 0.9, "rows": 20, "acc": 0.85, "artifact": {}},
        "champion": {"score": 0.8, "rows": 20, "acc": 0.7, "version": "3", "artifact": {}},
    },
)
PROMOTE = StageFacts(
    name="promote",
    kind="promote",
    status="succeeded",
    attempt=1,
    elapsed=1.0,
    value={"promoted": True, "reason": "the gate holds", "version": "4", "model": {"path": "/s/registry/4"}},
)


def facts(*stages: StageFacts, status: str = "succeeded", error: dict[str, str] | None = None) -> RunFacts:
    return RunFacts(
        run_id="r1",
        pipeline="p",
        status=status,
        storage="file:///data/my%20store",
        artifacts="/data/my store",
        stages=stages,
        elapsed=142.0,
        error=error,
    )


def test_a_successful_run_tells_the_result_of_each_stage_and_where_things_lie() -> None:
    assert summary(facts(PREPARE, TRAIN, EVALUATE, PROMOTE)) == [
        "run r1: succeeded after 2:22",
        "  prepare   80 rows to train on, 20 held out, 3 rejected (see /s/rejected.jsonl) (0:07)",
        "  train     reached step 40, reward 0.050 -> 0.930 (best 0.951) (2:10)",
        "  evaluate  candidate 0.900 (acc 0.850), champion 3 0.800 (acc 0.700), on 20 rows (0:04)",
        "  promote   promoted as 4: the gate holds (0:01)",
        "  storage:  /data/my store",
        "  files:    /data/my store/runs/r1",
        "  model:    /s/registry/4",
    ]
    assert advice(facts(PREPARE, TRAIN, EVALUATE, PROMOTE)) == []


def test_a_model_that_is_not_promoted_says_why_and_shows_no_model() -> None:
    kept = replace(PROMOTE, value={"promoted": False, "reason": "0.7 > 0.8 is false", "version": None, "model": None})
    lines = summary(facts(kept))
    assert lines[1] == "  promote   not promoted: 0.7 > 0.8 is false (0:01)"
    assert not any("model:" in line for line in lines)


def test_a_first_run_has_no_champion() -> None:
    value = {**EVALUATE.value, "champion": None}
    assert "no champion yet" in summary(facts(replace(EVALUATE, value=value)))[1]


def test_a_value_of_another_shape_is_shown_as_it_is() -> None:
    assert '{"score": 1}' in summary(facts(replace(EVALUATE, value={"score": 1})))[1]


def test_a_python_stage_shows_its_value_in_one_line() -> None:
    lines = summary(facts(replace(TRAIN, kind="python", value={"text": "x" * 500})))
    assert lines[1].startswith('  train     {"text": "xxx')
    assert len(lines[1]) < 130


def test_bad_data_is_mended_in_the_pipeline_or_in_its_files() -> None:
    error = {"code": "data_invalid", "message": "train: the training set has 8 rows"}
    failed = replace(TRAIN, status="failed", value=None, error=error)
    assert advice(facts(PREPARE, failed, status="failed"))[-2:] == [
        "mend the pipeline and start a new run: finished stages are re-used",
        "or, once files that it names are mended: verl-workflow resume r1 --storage '/data/my store'",
    ]


def test_a_failed_run_says_what_failed_and_how_to_go_on() -> None:
    failed = replace(TRAIN, status="failed", value=None, error={"message": "train: the reward raised. Mend it"})
    stopped = facts(PREPARE, failed, replace(EVALUATE, status="waiting", attempt=0), status="failed")
    assert summary(stopped)[2:4] == ["  train     failed in attempt 2", "  evaluate  not started"]
    assert advice(stopped) == [
        "error: train: the reward raised. Mend it",
        "log: verl-workflow logs r1 --stage train --storage '/data/my store'",
        "why, and what it cost: verl-workflow explain r1 --storage '/data/my store'",
        "resume with: verl-workflow resume r1 --storage '/data/my store'",
    ]


def test_a_cancelled_run_is_not_said_to_be_resumable() -> None:
    assert advice(facts(PREPARE, status="cancelled")) == []


def test_warnings_of_a_training_and_the_choice_of_a_sweep_are_told() -> None:
    warned = replace(TRAIN, value={**TRAIN.value, "warnings": ["kl is 0.9, above 0.5, at step 12"]})
    choice = {
        "winner": "train-2",
        "values": {"rate": 0.005, "n": 8},
        "figure": 0.75,
        "table": [{"member": "train-1"}, {"member": "train-2"}],
    }
    best = StageFacts(name="best", kind="choose", status="succeeded", attempt=1, elapsed=0.1, value=choice)
    lines = summary(facts(warned, best))
    assert ", warned: kl is 0.9, above 0.5, at step 12 (" in lines[1]
    assert "train-2 (rate 0.005, n 8) is best of 2: 0.750" in lines[2]
