"""The stage's own decisions, with a stand-in for verl's process on a real Ray."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from _training_pieces import failure, launched

from verl_workflow.errors import ErrorCode, UserError
from verl_workflow.training._checkpoints import checkpoints
from verl_workflow.training._owner import claim

pytestmark = pytest.mark.usefixtures("ray_cluster")


def test_outputs_and_progress(run: Callable[..., Any], tmp_path: Path) -> None:
    outputs, reports = run()
    assert json.loads(json.dumps(outputs)) == outputs
    assert outputs["step"] == outputs["checkpoint"]["step"] == 6
    assert outputs["reward"] == {"first": 0.1, "last": 0.6, "best": 0.6}
    assert (Path(outputs["model"]["path"]) / "model.safetensors").exists()
    assert len(Path(outputs["metrics"]["path"]).read_text().splitlines()) == 6
    phases = [report["phase"] for report in reports]
    assert (phases[0], phases[-1]) == ("starting", "exporting")
    training = [report for report in reports if report["phase"] == "training"]
    assert training[-1] == {
        "phase": "training",
        "step": 6,
        "total": 6,
        "reward": 0.6,
        "step_seconds": 0.1,
        "eta_seconds": 0.0,
    }
    assert launched(tmp_path, 1)["trainer.resume_mode"] == "disable"


def test_killed_and_resumed_from_the_newest_valid_checkpoint(run: Callable[..., Any], tmp_path: Path) -> None:
    error = failure(run, 1, {"die": 5, "tear": 4})
    assert (error.code, error.retryable) == (ErrorCode.TRAINING_FAILED, True)
    assert "signal 9" in str(error)
    outputs, _ = run(2)
    assert launched(tmp_path, 2)["trainer.resume_from_path"].endswith("global_step_2")
    kept = (tmp_path / "storage/runs/run/stages/train/checkpoints").glob("global_step_*")
    assert sorted(folder.name for folder in kept) == ["global_step_4", "global_step_6"]
    assert outputs["step"] == 6
    assert outputs["reward"]["first"] == 0.1
    steps = [json.loads(text)["step"] for text in Path(outputs["metrics"]["path"]).read_text().splitlines()]
    assert steps == [1, 2, 3, 4, 5, 6]


def test_what_was_wrong_with_a_checkpoint_is_told(run: Callable[..., Any]) -> None:
    failure(run, 1, {"die": 5, "tear": 4})
    outputs, _ = run(2)
    assert outputs["warnings"] == ["the checkpoint of step 4 was set aside as broken-global_step_4: data.pt is missing"]


def test_the_best_checkpoint_stays_and_is_told(run: Callable[..., Any], tmp_path: Path) -> None:
    best = {"mode": "min"}
    failure(run, 1, {"die": 5}, steps=10, keep_best=best)
    outputs, _ = run(2, steps=10, keep_best=best, hand_on="best")
    root = tmp_path / "storage/runs/run/stages/train/checkpoints"
    assert sorted(folder.name for folder in root.glob("global_step_*")) == [
        "global_step_10",
        "global_step_2",
        "global_step_8",
    ]
    assert outputs["best"] == {"path": str(root / "global_step_2"), "step": 2, "metric": "reward", "value": 0.2}
    assert outputs["checkpoint"]["step"] == 10
    assert run(3, steps=10)[0]["best"] is None


def test_an_attempt_that_comes_after_a_later_one_does_not_begin(run: Callable[..., Any], tmp_path: Path) -> None:
    failure(run, 1, {"die": 3})
    root = tmp_path / "storage/runs/run/stages/train/checkpoints"
    claim(root, "2.3")
    assert failure(run, 2).code is ErrorCode.FENCED
    assert launched(tmp_path, 2) is None
    assert [found.step for found in checkpoints(root)] == [2]


def test_a_training_that_was_done_is_not_started_again(run: Callable[..., Any], tmp_path: Path) -> None:
    first, _ = run(1)
    second, _ = run(2)
    assert launched(tmp_path, 2) is None
    assert second["model"]["sha256"] == first["model"]["sha256"]
    assert second["model"]["path"] != first["model"]["path"]
    assert second["reward"] == first["reward"]


def test_ending_early_without_an_error_is_a_failure(run: Callable[..., Any]) -> None:
    error = failure(run, 1, {"last": 4})
    assert (error.code, error.retryable) == (ErrorCode.NO_PROGRESS, True)
    assert "step 4 of 6" in str(error)
    error = failure(run, 2, {"last": 4})
    assert (error.code, error.retryable) == (ErrorCode.NO_PROGRESS, False)


def test_a_last_checkpoint_that_is_not_whole_is_a_failure(run: Callable[..., Any]) -> None:
    error = failure(run, 1, {"tear": 6})
    assert error.code is ErrorCode.NO_PROGRESS
    assert "newest valid checkpoint: 4" in str(error)


def test_dead_numbers_at_the_last_step_are_a_failure(run: Callable[..., Any]) -> None:
    error = failure(run, 1, {"nan": 6})
    assert (error.code, error.retryable) == (ErrorCode.TRAINING_FAILED, False)
    assert "actor/grad_norm is not finite at step 6" in str(error)
    # The checkpoint of that step is whole as a file: it must not count as success on the next attempt either.
    error = failure(run, 2)
    assert "actor/grad_norm" in str(error)


@pytest.mark.parametrize(
    ("kind", "message", "named", "retryable"),
    [
        ("builtins.ValueError", "the cause", "configuration", False),
        ("ray.exceptions.ActorDiedError", "the cause", "infrastructure", True),
        ("torch.OutOfMemoryError", "CUDA out of memory: the cause", "memory.gpu", False),
    ],
)
def test_the_cause_and_the_log_are_in_the_error(
    run: Callable[..., Any], kind: str, message: str, named: str, retryable: bool
) -> None:
    error = failure(run, 1, {"error": {"errors": [{"type": kind, "message": message}]}})
    assert (error.code, error.retryable) == (ErrorCode.TRAINING_FAILED, retryable)
    assert f"the training failed ({named}): {kind.rsplit('.')[-1]}: {message}" in str(error)
    assert "the stand-in is about to fail" in str(error)


def test_a_checkpoint_that_verl_cannot_load_is_set_aside(run: Callable[..., Any], tmp_path: Path) -> None:
    failure(run, 1, {"die": 5})
    broken = {"errors": [{"type": "builtins.RuntimeError", "message": "PytorchStreamReader failed reading"}]}
    assert failure(run, 2, {"last": 4, "error": broken}).retryable
    run(3)
    assert launched(tmp_path, 2)["trainer.resume_from_path"].endswith("global_step_4")
    assert launched(tmp_path, 3)["trainer.resume_from_path"].endswith("global_step_2")
    assert (tmp_path / "storage/runs/run/stages/train/checkpoints/broken-global_step_4").is_dir()


def test_files_that_cannot_be_loaded_without_a_checkpoint_are_the_models(run: Callable[..., Any]) -> None:
    broken = {"errors": [{"type": "safetensors_rust.SafetensorError", "message": "header: MetadataIncompleteBuffer"}]}
    error = failure(run, 1, {"error": broken})
    assert "the training failed (configuration)" in str(error)
    assert "The files of the model itself cannot be loaded" in str(error)
    assert not error.retryable


def test_another_model_in_the_same_place_is_refused(run: Callable[..., Any], tmp_path: Path) -> None:
    failure(run, 1, {"die": 3})
    (tmp_path / "model/config.json").write_text(json.dumps({"hidden_size": 128}))
    assert failure(run, 2).code is ErrorCode.CHECKPOINT_INVALID


def test_what_is_wrong_with_the_stage_is_told_before_anything_starts(run: Callable[..., Any], tmp_path: Path) -> None:
    error = failure(run, 1, batch_size=64)
    assert isinstance(error, UserError)
    assert error.code is ErrorCode.DATA_INVALID
    assert not (tmp_path / "storage").exists()


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("raise KeyError('place')", "the reward raised KeyError: 'place'"),
        ("return None", "the reward returned no number"),
    ],
)
def test_a_reward_is_tried_before_verl_is_started(
    run: Callable[..., Any], tmp_path: Path, body: str, message: str
) -> None:
    import pyarrow as pa
    from pyarrow import parquet

    row = {"prompt": [{"role": "user", "content": "1 + 1 ="}], "reward_model": {"ground_truth": "2"}}
    parquet.write_table(pa.Table.from_pylist([row] * 32), tmp_path / "train.parquet")
    (tmp_path / "code").mkdir(exist_ok=True)
    (tmp_path / "code" / "tried.py").write_text(
        f"def score(data_source, solution_str, ground_truth, extra_info=None):\n    {body}\n"
    )
    error = failure(run, 1, reward={"function": "tried.py:score"})
    assert error.code is ErrorCode.REWARD_INVALID
    assert message in str(error)
    assert "tried on the first row" in str(error)
    assert launched(tmp_path, 1) is None


def test_a_cluster_that_is_too_small_is_told_at_once(run: Callable[..., Any]) -> None:
    error = failure(run, 1, device="cuda", gpus_per_node=2, nodes=2)
    assert isinstance(error, UserError)
    assert error.code is ErrorCode.CAPACITY
    assert "group 1 of 2, 2 bundles of 1 GPU and 3 CPUs for the trainer on one node fits nowhere" in str(error)


def test_a_driver_started_in_a_worker_does_not_take_itself_for_one(monkeypatch: pytest.MonkeyPatch) -> None:
    import ray

    @ray.remote(num_cpus=1)
    def inside() -> dict[str, str]:
        from verl_workflow.training._environment import driver_environment

        assert "RAY_JOB_ID" in os.environ
        return driver_environment({"VERL_PLATFORM": "cpu"})

    environment = ray.get(inside.remote())
    assert not {"RAY_JOB_ID", "RAY_RAYLET_PID", "CUDA_VISIBLE_DEVICES"} & set(environment)
    assert environment["VERL_PLATFORM"] == "cpu"
    assert environment["RAY_DEDUP_LOGS"] == "0"
