from __future__ import annotations

import json
import shutil
import threading
from pathlib import Path
from typing import Any

import pytest
from _runs import Invoke, Runs

from verl_workflow.errors import ErrorCode, UserError, VerlWorkflowError
from verl_workflow.training._history import Outcome, record
from verl_workflow.training.failures import Failure, FailureClass
from verl_workflow.workflow import StepContext, read_run, request_cancel
from verl_workflow.workflow._definition import run_key

DATA = {"rows": {"train": 80, "validation": 20, "rejected": 0}, "rejected": None}
TRAINED = {"step": 4, "reward": {"first": 0.1, "last": 0.9, "best": 0.95}}
KILLED = Failure(
    kind=FailureClass.INFRASTRUCTURE,
    what="the training failed (infrastructure): ActorDiedError: worker died",
    evidence=("ActorDiedError: worker died", "SYSTEM_ERROR"),
    advice="The next attempt resumes.",
)


def kept(runs: Runs, run_id: str, number: int, **facts: Any) -> None:
    folder = runs.log(run_id, "train", number).parent
    record(folder, Outcome(**{"attempt": number, "epoch": 1, "began": 1000.0, "ended": 1600.0, **facts}))


def fails(context: StepContext) -> Any:
    raise VerlWorkflowError(ErrorCode.TRAINING_FAILED, "the GPU fell off", where="train", remedy="Put it back.")


def twice(context: StepContext) -> Any:
    if context.attempt == 1:
        raise VerlWorkflowError(ErrorCode.TRAINING_FAILED, "a node went", where="train", retryable=True)
    return TRAINED


def recorded(runs: Runs, kind: str, *, after: str = "", **facts: Any) -> Any:
    """A training that keeps of what it failed, and raises it, as real ones do."""
    failure = Failure(kind=FailureClass(kind), what=f"the training failed ({kind}): it broke", advice="Mend it.")

    def call(context: StepContext) -> Any:
        kept(runs, "r1", context.attempt, trained_s=3600.0, reached=4, saved=2, failure=failure, **facts)
        remedy = f"{failure.advice} {after} Last words of /x/log.txt:\na line of the log".replace("  ", " ")
        raise VerlWorkflowError(ErrorCode.TRAINING_FAILED, failure.what, where="train", remedy=remedy, retryable=True)

    return call


def test_what_a_training_recorded_is_told_once_with_what_followed(runs: Runs, invoke: Invoke) -> None:
    runs.finish("r1", {"train": recorded(runs, "stall", after="All 2 attempts have failed.")}, attempts=2)
    told = invoke("explain", "r1").stdout
    assert told.count("it broke") == 2
    assert told.count("    All 2 attempts have failed.") == 2
    assert "a line of the log" not in told
    assert "error:" not in told
    assert "verl-workflow logs r1 --stage train" in told


@pytest.mark.parametrize(
    ("kind", "resumes", "anew"),
    [
        ("infrastructure", True, False),
        ("stall", True, False),
        ("disk", True, False),
        ("memory.host", True, False),
        ("unknown", True, False),
        ("configuration", True, True),
        ("data", True, True),
        ("memory.gpu", True, True),
        ("numeric", False, True),
        ("reward", False, True),
    ],
)
def test_what_to_type_next_follows_from_the_class(
    runs: Runs, invoke: Invoke, kind: str, resumes: bool, anew: bool
) -> None:
    runs.finish("r1", {"train": recorded(runs, kind)}, source="demo.yaml")
    for verb in ("explain", "status"):
        told = invoke(verb, "r1").stdout
        assert (f"verl-workflow resume r1 --storage {runs.path}" in told) is resumes
        assert (f"verl-workflow run demo.yaml --storage {runs.path}" in told) is anew


def test_a_running_training_is_told_with_what_it_does_and_loses_nothing_yet(runs: Runs, invoke: Invoke) -> None:
    reported, enough = threading.Event(), threading.Event()

    def trains(context: StepContext) -> Any:
        kept(runs, "r1", 1, ended=None)
        metrics = runs.log("r1", "train", 1).parent / "verl_metrics.jsonl"
        metrics.write_text(json.dumps({"step": 3, "data": {"timing_s/step": 1.0}}) + "\n")
        context.report({"phase": "training", "step": 3, "total": 12, "step_seconds": 2.0})
        reported.set()
        assert enough.wait(60)
        return TRAINED

    runs.create("r1", {"train": trains})
    thread = runs.drive_in_background("r1", {"train": trains})
    assert reported.wait(60)
    told = invoke("explain", "r1").stdout
    found = json.loads(invoke("explain", "r1", "--json").stdout)
    enough.set()
    thread.join(60)
    assert "run r1: running after" in told
    assert "Nothing has failed." in told
    assert "it is at step 3/12, 2.0 s/step" in told
    assert "    it runs" in told
    assert "what to do" not in told
    [train] = found["stages"]
    assert train["progress"]["done"] == 3
    assert train["attempts"][0]["running"]
    assert train["attempts"][0]["seconds"] is not None
    assert train["spent"]["used_hours"] > 0
    assert train["spent"]["wasted_hours"] == 0


def test_a_cancelled_run_says_how_to_begin_anew(runs: Runs, invoke: Invoke) -> None:
    def stops(context: StepContext) -> Any:
        request_cancel(runs.store, "r1")
        return DATA

    runs.finish("r1", {"prepare": stops, "train": lambda _: TRAINED}, source="demo.yaml")
    assert read_run(runs.store, "r1").status.value == "cancelled"
    told = invoke("explain", "r1").stdout
    assert "It was stopped before anything failed." in told
    assert (
        "a cancelled run cannot be resumed; start a new one (finished stages are re-used): verl-workflow run demo.yaml"
        in told
    )


def test_a_run_whose_driver_was_lost_says_how_to_resume(runs: Runs, invoke: Invoke) -> None:
    runs.finish("r1", {"train": fails})
    kept(runs, "r1", 1, ended=None)
    # The driver died after it had started the training.
    journal = runs.store.list(f"{run_key(runs.store, 'r1').folder}/journal")
    started = next(n for n, key in enumerate(journal) if b"step_started" in (runs.store.get(key) or b""))
    for key in journal[started + 1 :]:
        runs.store.delete(key)
    told = invoke("explain", "r1").stdout
    assert "run r1: resumable" in told
    assert "driver: gone" in told
    assert "stage train (verl): interrupted" in told
    assert "its process was lost, or its driver with it, and left no word of why" in told
    assert f"resume with: verl-workflow resume r1 --storage {runs.path}" in told


def test_hours_of_all_trainings_are_added_up(runs: Runs, invoke: Invoke) -> None:
    runs.finish("r1", {"train": twice, "train-2": twice}, attempts=2)
    for name in ("train", "train-2"):
        for number in (1, 2):
            folder = runs.log("r1", name, number).parent
            record(folder, Outcome(attempt=number, epoch=1, began=0.0, ended=1.0, gpus=4, trained_s=900.0, reached=1))
    assert "used in all: 4.00 GPU-hours, of which 4.00 were lost" in invoke("explain", "r1").stdout


def test_a_failed_training_is_told_with_class_evidence_cost_and_what_to_do(runs: Runs, invoke: Invoke) -> None:
    runs.finish("r1", {"prepare": lambda _: DATA, "train": fails})
    kept(runs, "r1", 1, gpus=8, trained_s=450.0, start=4, reached=14, saved=9, changes={"a.b": 4}, failure=KILLED)
    shown = invoke("explain", "r1")
    assert shown.exit_code == 0
    told = shown.stdout
    assert "stage train (verl): failed" in told
    assert "0:10:00" in told or "10:00" in told
    assert "from step 4 to step 14, newest whole checkpoint 9" in told
    assert "tried with a.b=4" in told
    assert "    infrastructure: ActorDiedError: worker died" in told
    assert "      | SYSTEM_ERROR" in told
    assert "      | ActorDiedError" not in told
    assert "The next attempt resumes." in told
    assert "used: 1.00 GPU-hours, of which 0.50 were lost" in told
    assert f"resume with: verl-workflow resume r1 --storage {runs.path}" in told
    assert "prepare" not in told


def test_what_was_retried_and_what_it_cost_is_told_of_a_run_that_succeeded(runs: Runs, invoke: Invoke) -> None:
    runs.finish("r1", {"train": twice}, attempts=2)
    kept(runs, "r1", 1, trained_s=3600.0, reached=10, saved=8, failure=KILLED)
    kept(runs, "r1", 2, trained_s=3600.0, start=8, reached=20, saved=20)
    told = invoke("explain", "r1").stdout
    assert told.index("attempt 1") < told.index("attempt 2")
    assert "from the model to step 10" in told
    assert "used: 2.00 hours of training on the CPU, of which 0.20 were lost" in told
    assert "what to do" not in told


def test_a_run_without_trouble_says_so(runs: Runs, invoke: Invoke) -> None:
    runs.finish("r1", {"prepare": lambda _: DATA, "train": lambda _: TRAINED})
    assert "Nothing has failed, and each stage took one attempt." in invoke("explain", "r1").stdout


def test_a_stage_of_another_kind_is_told_by_its_error(runs: Runs, invoke: Invoke) -> None:
    def spoilt(context: StepContext) -> Any:
        raise UserError(ErrorCode.DATA_INVALID, "no row is left", where="prepare", remedy="Look at the rejected ones.")

    runs.finish("r1", {"prepare": spoilt, "train": lambda _: TRAINED})
    told = invoke("explain", "r1").stdout
    assert "stage prepare (data): failed" in told
    assert "failed: prepare: no row is left. Look at the rejected ones." in told
    assert "stage train" not in told


def test_an_attempt_whose_process_was_lost_is_told_by_what_it_left(runs: Runs, invoke: Invoke) -> None:
    runs.finish("r1", {"train": twice}, attempts=2)
    kept(runs, "r1", 1, ended=None)
    told = invoke("explain", "r1").stdout
    assert ": before its first step\n" in told
    assert "newest whole checkpoint" not in told
    metrics = runs.log("r1", "train", 1).parent / "verl_metrics.jsonl"
    metrics.write_text(json.dumps({"step": 3, "data": {"timing_s/step": 1.0}}) + "\n")
    told = invoke("explain", "r1").stdout
    assert "from step 2 to step 3, newest whole checkpoint none" in told


def test_everything_is_in_one_document(runs: Runs, invoke: Invoke) -> None:
    runs.finish("r1", {"prepare": lambda _: DATA, "train": fails})
    kept(runs, "r1", 1, gpus=1, trained_s=3600.0, reached=4, saved=2, failure=KILLED)
    found = json.loads(invoke("explain", "r1", "--json").stdout)
    [train] = found["stages"]
    assert train["attempts"][0]["failure"]["class"] == "infrastructure"
    assert found["spent"] == {"used_hours": 1.0, "wasted_hours": 0.5, "gpus": 1}
    assert found["next"][0] == "error: train: the GPU fell off. Put it back."


def test_one_stage_can_be_asked_for(runs: Runs, invoke: Invoke) -> None:
    runs.finish("r1", {"prepare": lambda _: DATA, "train": fails})
    assert "stage prepare (data): succeeded" in invoke("explain", "r1", "--stage", "prepare").stdout
    refused = invoke("explain", "r1", "--stage", "trian")
    assert refused.exit_code == 2
    assert "'train'" in refused.stderr


def test_a_run_that_nobody_knows_is_refused(runs: Runs, invoke: Invoke) -> None:
    runs.finish("r1", {"train": fails})
    assert invoke("explain", "r2").exit_code == 2


def test_a_run_whose_files_are_gone_is_told_by_its_journal(runs: Runs, invoke: Invoke, tmp_path: Path) -> None:
    runs.finish("r1", {"model": lambda _: {"path": "/models/ab12"}, "train": fails})
    shutil.rmtree(runs.path / "runs/r1/stages", ignore_errors=True)
    told = invoke("explain", "r1").stdout
    assert "failed: train: the GPU fell off" in told
    assert "its files are gone" in told
    told_of_model = invoke("explain", "r1", "--stage", "model").stdout
    assert "stage model (model): succeeded" in told_of_model
    assert "its files are gone" not in told_of_model, "it is kept elsewhere"
    assert "used:" not in told


def test_status_points_to_it(runs: Runs, invoke: Invoke) -> None:
    runs.finish("r1", {"train": fails})
    assert f"why, and what it cost: verl-workflow explain r1 --storage {runs.path}" in invoke("status", "r1").stdout
