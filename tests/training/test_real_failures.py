"""How real verl fails, and what the stage makes of it: each class that a CPU can produce."""

from __future__ import annotations

import json
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from _real_training import at_step, parquet, prepared, processes
from _training_pieces import torch_archive

from verl_workflow.errors import VerlWorkflowError
from verl_workflow.training import run_verl_stage
from verl_workflow.training._checkpoints import write_manifest
from verl_workflow.training._history import Outcome, outcomes
from verl_workflow.training.failures import Failure

pytestmark = [pytest.mark.fault, pytest.mark.slow, pytest.mark.usefixtures("ray_cluster")]

# The processes that are killed and stopped below are forked ones in most tests, which also spares their start.
QUICK = {"start": 300.0, "first_step": 60.0, "times_median": 3.0, "at_least": 25.0}


def failed(spec: Any, attempt: Any) -> tuple[VerlWorkflowError, Failure, Outcome]:
    with pytest.raises(VerlWorkflowError) as caught:
        run_verl_stage(spec, attempt)
    outcome = outcomes(attempt.stage_dir)[-1]
    assert outcome.failure is not None, str(caught.value)
    assert outcome.failure.evidence
    assert outcome.failure.advice
    return caught.value, outcome.failure, outcome


def test_a_setting_that_only_verl_finds_wrong(tmp_path: Path, context: Callable[..., Any]) -> None:
    overrides = {"trainer.v1.sampler.custom_sampler.path": "pkg://of_nobody.at_all"}
    spec, attempt = prepared(tmp_path, context, overrides=overrides)
    error, failure, _ = failed(spec, attempt())
    assert failure.kind.value == "configuration", failure
    assert "of_nobody" in failure.what
    assert not error.retryable


def test_a_file_of_rows_that_is_cut_off(tmp_path: Path, context: Callable[..., Any]) -> None:
    parquet(tmp_path / "validation.parquet", 64, 3)
    whole = (tmp_path / "validation.parquet").read_bytes()
    (tmp_path / "validation.parquet").write_bytes(whole[: len(whole) // 2])
    spec, attempt = prepared(tmp_path, context)
    error, failure, _ = failed(spec, attempt())
    assert failure.kind.value == "data", failure
    assert not error.retryable


def test_a_reward_that_raises(tmp_path: Path, context: Callable[..., Any]) -> None:
    reward = {"function": "reward.py:score", "kwargs": {"trouble": "the-place"}}
    spec, attempt = prepared(tmp_path, context, reward=reward, deadlines=QUICK)
    error, failure, _ = failed(spec, attempt())
    assert failure.kind.value == "reward", failure
    assert "the-place" in failure.what
    assert "reward.py" in failure.what
    assert not error.retryable


@pytest.mark.parametrize("warm", [False, True])
def test_a_reward_that_hangs(tmp_path: Path, context: Callable[..., Any], warm: bool) -> None:
    reward = {"function": "reward.py:score", "kwargs": {"trouble": "hang"}}
    spec, attempt = prepared(tmp_path, context, reward=reward, deadlines=QUICK, warm_start=warm)
    error, failure, _ = failed(spec, attempt())
    assert failure.kind.value == "stall", failure
    assert error.retryable
    folder = tmp_path / "storage/runs/run/stages/train/attempts/001/stacks"
    assert "RewardLoopWorker" in (folder / "actors.json").read_text()
    stacks = list(folder.glob("this-node-*.txt"))
    assert any("score (" in stack.read_text() for stack in stacks), [stack.name for stack in stacks]


@pytest.mark.parametrize(
    ("name", "kinds"),
    [
        ("WorkerDict", {"infrastructure"}),
        ("AgentLoopWorker", {"infrastructure", "stall"}),
        ("SimpleStorageUnit", {"infrastructure", "stall"}),
        ("HFServer", {"infrastructure", "stall"}),
    ],
)
def test_a_process_of_verls_that_is_killed(
    tmp_path: Path, context: Callable[..., Any], name: str, kinds: set[str]
) -> None:
    spec, attempt = prepared(tmp_path, context, deadlines=QUICK, steps=30, warm_start=True)
    killed: list[int] = []

    def kill() -> None:
        for process in processes(first.attempt_dir, name):
            process.kill()
            killed.append(process.pid)

    first = attempt(1, report=at_step(2, kill))
    error, failure, outcome = failed(spec, first)
    assert killed
    assert failure.kind.value in kinds, failure
    assert error.retryable
    assert outcome.reached >= 2
    assert outcome.saved >= 1
    shorter = spec.model_copy(update={"steps": outcome.saved + 1})
    assert run_verl_stage(shorter, attempt(2))["step"] == outcome.saved + 1


def test_a_process_of_verls_that_stands_still(tmp_path: Path, context: Callable[..., Any]) -> None:
    spec, attempt = prepared(tmp_path, context, deadlines=QUICK, steps=30, warm_start=True)

    def freeze() -> None:
        for process in processes(first.attempt_dir, "WorkerDict"):
            process.send_signal(signal.SIGSTOP)

    first = attempt(1, report=at_step(2, freeze))
    error, failure, _ = failed(spec, first)
    assert failure.kind.value == "stall", failure
    assert error.retryable
    # Ray ends the processes of a driver that is gone within seconds, frozen ones, too.
    assert psutil.wait_procs(processes(first.attempt_dir, ""), timeout=60)[1] == []


def test_a_checkpoint_that_looks_whole_and_cannot_be_loaded(tmp_path: Path, context: Callable[..., Any]) -> None:
    spec, attempt = prepared(tmp_path, context, steps=3)
    run_verl_stage(spec, attempt(1))
    root = tmp_path / "storage/runs/run/stages/train/checkpoints"
    newest = root / "global_step_3"
    torch_archive(newest / "actor/model_world_size_1_rank_0.pt")
    facts = json.loads((newest / "manifest.json").read_text())
    write_manifest(newest, writer=facts["writer"], identity=facts["identity"], roles=facts["roles"])
    longer = spec.model_copy(update={"steps": 4})
    error, failure, _ = failed(longer, attempt(2))
    assert failure.kind.value == "checkpoint", failure
    assert error.retryable
    assert (root / "broken-global_step_3").is_dir()
    outputs = run_verl_stage(longer, attempt(3))
    assert outputs["step"] == 4
    assert outcomes(root.parent)[-1].start == 2


def test_gradients_that_are_no_numbers(tmp_path: Path, context: Callable[..., Any]) -> None:
    spec, attempt = prepared(tmp_path, context, steps=30, learning_rate=1e30, save_every=10, warm_start=True)
    error, failure, outcome = failed(spec, attempt())
    assert failure.kind.value == "numeric", failure
    assert not error.retryable
    assert outcome.reached < 30


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    folder = tmp_path / "small"
    folder.mkdir()
    done = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64m", "tmpfs", str(folder)], check=False)
    if done.returncode:
        pytest.skip("only root can mount a disk of its own")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


def test_a_disk_that_fills_up(tmp_path: Path, context: Callable[..., Any], small_disk: Path) -> None:
    spec, attempt = prepared(tmp_path, context, steps=30, save_every=3, warm_start=True)

    def fill() -> None:
        with (small_disk / "filler").open("wb", buffering=0) as file:
            try:
                while True:
                    file.write(bytes(1 << 16))
            except OSError:
                file.truncate(max(0, file.tell() - (1 << 18)))

    error, failure, outcome = failed(spec, attempt(1, root=small_disk, report=at_step(1, fill)))
    assert failure.kind.value == "disk", failure
    assert not error.retryable
    (small_disk / "filler").unlink()
    assert outcome.reached >= 1


def test_a_training_that_is_asked_to_hand_over_saves_and_ends(tmp_path: Path, context: Callable[..., Any]) -> None:
    from verl_workflow.training._handover import ask

    spec, attempt = prepared(tmp_path, context, steps=30, save_every=20, warm_start=True)
    first = attempt(1, report=at_step(2, lambda: ask(first.attempt_dir)))
    error, failure, outcome = failed(spec, first)
    assert failure.preempted, failure
    assert error.retryable
    assert outcome.saved == outcome.reached
    assert 2 <= outcome.saved < 20
