"""What watches over a training, with a stand-in for verl's process on a real Ray."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from _training_pieces import failure, launched

from verl_workflow.errors import ErrorCode
from verl_workflow.training._history import Outcome, outcomes

pytestmark = pytest.mark.usefixtures("ray_cluster")


def kept(tmp_path: Path) -> list[Outcome]:
    return outcomes(tmp_path / "storage/runs/run/stages/train")


def checkpoints(tmp_path: Path) -> list[str]:
    folder = tmp_path / "storage/runs/run/stages/train/checkpoints"
    return sorted(path.name for path in folder.iterdir() if "global_step" in path.name)


def test_each_attempt_leaves_what_it_came_to(run: Callable[..., Any], tmp_path: Path) -> None:
    failure(run, 1, {"die": 5})
    run(2)
    first, second = kept(tmp_path)
    assert (first.start, first.reached, first.saved) == (0, 5, 4)
    assert first.failure is not None
    assert first.failure.kind.value == "infrastructure"
    assert (second.start, second.reached, second.saved, second.failure) == (4, 6, 6, None)
    assert first.ended is not None
    assert first.began < first.ended <= second.began
    assert 0 < first.trained_s < first.ended - first.began + 1


def test_a_guard_stops_the_training(run: Callable[..., Any], tmp_path: Path) -> None:
    error = failure(run, 1, {"kl": {"5": 0.9}, "pause": 0.2}, steps=40, guards=[{"kl_above": 0.5}])
    assert (error.code, error.retryable) == (ErrorCode.TRAINING_FAILED, False)
    assert "the guard kl_above found: kl is 0.9, above 0.5, at step 5" in str(error)
    assert "The last checkpoint from before it is that of step 4." in str(error)
    [outcome] = kept(tmp_path)
    assert outcome.failure is not None
    assert outcome.failure.kind.value == "numeric"
    assert outcome.reached < 40


def test_a_guard_that_only_warns_lets_it_go_on(run: Callable[..., Any]) -> None:
    outputs, reports = run(1, {"kl": {"5": 0.9}}, guards=[{"kl_above": 0.5, "policy": "warn"}])
    assert outputs["step"] == 6
    assert outputs["warnings"] == ["kl is 0.9, above 0.5, at step 5"]
    assert any("kl is 0.9" in report.get("warning", "") for report in reports)


def test_a_guard_that_rolls_back_trains_on_from_before_the_trouble(run: Callable[..., Any], tmp_path: Path) -> None:
    guard = {"kl_above": 0.5, "steps": 2, "policy": "rollback"}
    settings = {"steps": 12, "guards": [guard], "keep": 9}
    error = failure(run, 1, {"kl": {str(step): 0.9 for step in range(7, 13)}}, **settings)
    assert error.retryable
    assert "at steps 7 to 8" in str(error)
    assert "since step 7 are set aside" in str(error)
    assert [name for name in checkpoints(tmp_path) if not name.startswith("broken")] == [
        "global_step_2",
        "global_step_4",
        "global_step_6",
    ]
    outputs, _ = run(2, **settings)
    assert launched(tmp_path, 2)["trainer.resume_from_path"].endswith("global_step_6")
    assert outputs["step"] == 12


def test_trouble_that_comes_again_after_a_rollback_is_final(run: Callable[..., Any]) -> None:
    plan = {"kl": {str(step): 0.9 for step in range(7, 13)}}
    settings = {"steps": 12, "guards": [{"kl_above": 0.5, "policy": "rollback", "skip": 0}]}
    assert failure(run, 1, plan, **settings).retryable
    assert not failure(run, 2, plan, **settings).retryable


def test_dead_gradients_stop_the_training_long_before_its_end(run: Callable[..., Any], tmp_path: Path) -> None:
    error = failure(run, 1, {"nan_from": 3, "pause": 0.2}, steps=60)
    assert not error.retryable
    assert "actor/grad_norm is not finite at steps 3 to 7" in str(error)
    assert kept(tmp_path)[0].reached < 60


@pytest.mark.parametrize(
    ("hang", "deadlines", "said"),
    [
        ("start", {"start": 4.0}, "did not come to its first step within 4 s"),
        (1, {"first_step": 4.0}, "the first step was not finished within 4 s"),
        (4, {"at_least": 4.0}, "no step was finished for 4 s after step 3"),
    ],
)
def test_a_training_that_stands_still_is_stopped_and_its_stacks_are_kept(
    run: Callable[..., Any], tmp_path: Path, hang: Any, deadlines: dict[str, float], said: str
) -> None:
    error = failure(run, 1, {"hang": hang}, deadlines=deadlines)
    assert (error.code, error.retryable) == (ErrorCode.NO_PROGRESS, True)
    assert said in str(error)
    stacks = list((tmp_path / "storage/runs/run/stages/train/attempts/001/stacks").glob("this-node-*.txt"))
    assert any("wait_for_ever" in stack.read_text() for stack in stacks)
    [outcome] = kept(tmp_path)
    assert outcome.failure is not None
    assert outcome.failure.kind.value == "stall"
    run(2)


def test_a_crash_loop_ends(run: Callable[..., Any]) -> None:
    assert failure(run, 1, {"die": 5}, retry={"attempts": 9}).retryable
    error = failure(run, 2, {"die": 5}, retry={"attempts": 9})
    assert not error.retryable
    assert "crash loop" in str(error)


def test_a_smaller_micro_batch_follows_lost_gpu_memory_where_the_stage_allows_it(
    run: Callable[..., Any], tmp_path: Path
) -> None:
    key = "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu"
    out = {"errors": [{"type": "torch.OutOfMemoryError", "message": "CUDA out of memory. Tried to allocate 2 GiB"}]}
    assert not failure(run, 1, {"error": out, "last": 1}).retryable
    retry = {"changes": [{"against": "memory.gpu", "setting": "micro_batch"}]}
    error = failure(run, 2, {"error": out, "last": 3}, retry=retry)
    assert error.retryable
    outputs, _ = run(3, retry=retry)
    assert launched(tmp_path, 2)[key] == 8
    assert launched(tmp_path, 3)[key] == 4
    assert kept(tmp_path)[2].changes[key] == 4
    assert f"{key} was 4 instead of 16, after failures" in " ".join(outputs["warnings"])


def test_an_attempt_whose_process_was_lost_is_known_of(run: Callable[..., Any], tmp_path: Path) -> None:
    folder = tmp_path / "storage/runs/run/stages/train/attempts/001"
    folder.mkdir(parents=True)
    begun = Outcome(attempt=1, epoch=1, began=1.0)
    (folder / "outcome.json").write_text(json.dumps(begun.to_json()))
    assert failure(run, 2, {"die": 3}, retry={"attempts": 3}).retryable
    assert not failure(run, 3, {"die": 5}, retry={"attempts": 3}).retryable


def test_no_attempt_begins_when_all_are_used_up(run: Callable[..., Any], tmp_path: Path) -> None:
    for number in (1, 2):
        folder = tmp_path / f"storage/runs/run/stages/train/attempts/{number:03d}"
        folder.mkdir(parents=True)
        (folder / "outcome.json").write_text(json.dumps(Outcome(attempt=number, epoch=1, began=1.0).to_json()))
    error = failure(run, 3, retry={"attempts": 2})
    assert (error.code, error.retryable) == (ErrorCode.STEP_FAILED, False)
    assert launched(tmp_path, 3) is None
