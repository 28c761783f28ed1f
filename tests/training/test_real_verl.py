"""Real verl on the CPU: PPO with a critic and a reference, killed in the middle, resumed, and its model loaded.

The end-to-end tests do the same to GRPO.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from _real_training import REWARD, parquet
from _training_pieces import stage

from verl_workflow.errors import ErrorCode, VerlWorkflowError
from verl_workflow.training import run_verl_stage
from verl_workflow.training._checkpoints import checkpoints, fault
from verl_workflow.training._export import export

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.usefixtures("ray_cluster")]

ROLES = ("actor", "critic")


def training_pid(attempt_dir: Path) -> int:
    """Of verl's driver process, found by its command line."""
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                words = (entry / "cmdline").read_bytes().split(b"\0")
            except OSError:
                continue
            if b"verl_workflow.training.entry" in words and str(attempt_dir).encode() in words:
                return int(entry.name)
    raise AssertionError("verl's process is not there")


def test_killed_ppo_training_resumes_and_its_model_loads(tmp_path: Path, context: Callable[..., Any]) -> None:
    from verl_workflow.models import make_model
    from verl_workflow.spec._inputs import Model

    for name, rows, seed in (("train", 64, 1), ("validation", 8, 2)):
        parquet(tmp_path / f"{name}.parquet", rows, seed)
    model = make_model(Model(builtin="tiny"), tmp_path / "models", tmp_path)
    spec = stage(
        model="${model}",
        train=str(tmp_path / "train.parquet"),
        validation=str(tmp_path / "validation.parquet"),
        reward={"function": "reward.py:score", "kwargs": {"bonus": 1.0}},
        algorithm="ppo",
        rollouts=1,
        kl_coef=0.01,
        learning_rate=1e-3,
        critic_learning_rate=1e-3,
        steps=6,
        save_every=1,
    )

    killed: list[int] = []

    def kill(progress: Any) -> None:
        if progress["phase"] == "training" and progress["step"] >= 3 and not killed:
            killed.append(training_pid(first.attempt_dir))
            os.kill(killed[0], signal.SIGKILL)

    first = context(1, model=model, report=kill)
    (first.code_dir / "reward.py").write_text(REWARD)
    with pytest.raises(VerlWorkflowError) as caught:
        run_verl_stage(spec, first)
    assert (caught.value.code, caught.value.retryable) == (ErrorCode.TRAINING_FAILED, True), str(caught.value)
    assert killed
    root = first.stage_dir / "checkpoints"
    newest = checkpoints(root)[-1]
    # Whatever the kill left of the newest checkpoint, the one before must do.
    (newest.path / "actor" / "optim_world_size_1_rank_0.pt").write_bytes(b"PK")
    resumed_from = [one.step for one in checkpoints(root) if not fault(one, world_size=1, roles=ROLES)]

    assert resumed_from
    reports: list[Any] = []
    outputs = run_verl_stage(spec, context(2, reports, model=model))
    assert outputs["step"] == outputs["checkpoint"]["step"] == 6
    training = [report for report in reports if report["phase"] == "training"]
    assert training[0]["step"] == max(resumed_from) + 1
    assert training[-1]["step"] == 6
    rows = [json.loads(line) for line in Path(outputs["metrics"]["path"]).read_text().splitlines()]
    figures = [row.get("data", row) for row in rows]
    for name in ("critic/vf_loss", "actor/kl_loss"):
        assert all(math.isfinite(each[name]) for each in figures if name in each)
        assert sum(name in each for each in figures) == 6
    # The reward's keyword argument reached verl.
    assert outputs["reward"]["last"] >= 1.0
    loads(Path(outputs["model"]["path"]))

    # The same checkpoint without ready-made weights goes through verl's merger, to the same model in bfloat16.
    bare = root.parent / "bare" / "global_step_6"
    shutil.copytree(outputs["checkpoint"]["path"], bare)
    (bare / "actor/huggingface/model.safetensors").unlink()
    export(checkpoints(bare.parent)[0], tmp_path / "merged", log=tmp_path / "merge.log")
    one, other = loads(Path(outputs["model"]["path"])), loads(tmp_path / "merged")
    for name, tensor in one.state_dict().items():
        assert tensor.bfloat16().equal(other.state_dict()[name]), name


def loads(folder: Path) -> Any:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    assert AutoTokenizer.from_pretrained(folder).eos_token_id is not None
    model, info = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not info["missing_keys"]
    return model
