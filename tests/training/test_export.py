from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from _training_pieces import checkpoint, safetensors

from verl_workflow.errors import ErrorCode, VerlWorkflowError
from verl_workflow.training._checkpoints import checkpoints
from verl_workflow.training._export import export


def exported(root: Path, target: Path) -> Path:
    export(checkpoints(root)[0], target, log=root / "log")
    return target


@pytest.mark.parametrize(("dtype", "name"), [("F32", "float32"), ("BF16", "bfloat16")])
def test_the_config_tells_the_weights_true_type(tmp_path: Path, dtype: str, name: str) -> None:
    folder = checkpoint(tmp_path, 1)
    safetensors(folder / "actor/huggingface/model.safetensors", dtype)
    model = exported(tmp_path, tmp_path / "model")
    assert json.loads((model / "config.json").read_text())["dtype"] == name
    assert sorted(entry.name for entry in model.iterdir()) == ["config.json", "model.safetensors", "tokenizer.json"]
    assert not (tmp_path / "model.partial").exists()


def test_what_an_earlier_export_left_is_replaced(tmp_path: Path) -> None:
    checkpoint(tmp_path, 1)
    for leftover in ("model", "model.partial"):
        (tmp_path / leftover).mkdir()
        (tmp_path / leftover / "old").touch()
    assert not (exported(tmp_path, tmp_path / "model") / "old").exists()


@pytest.mark.parametrize("damage", ["cut", "index", "broken index", "config", "tokenizer"])
def test_a_model_that_is_not_whole_never_appears(tmp_path: Path, damage: str) -> None:
    source = checkpoint(tmp_path, 1) / "actor/huggingface"
    weights = source / "model.safetensors"
    if damage == "cut":
        weights.write_bytes(weights.read_bytes()[:-1])
    elif damage == "index":
        index = {"weight_map": {"w": "model.safetensors", "v": "model-2.safetensors"}}
        (source / "model.safetensors.index.json").write_text(json.dumps(index))
    elif damage == "broken index":
        (source / "model.safetensors.index.json").write_text("{")
    elif damage == "config":
        (source / "config.json").unlink()
    else:
        (source / "tokenizer.json").unlink()
    with pytest.raises(VerlWorkflowError) as caught:
        exported(tmp_path, tmp_path / "model")
    assert caught.value.code is ErrorCode.MODEL_INVALID
    assert not (tmp_path / "model").exists()
    assert not (tmp_path / "model.partial").exists()


@pytest.mark.parametrize(
    ("lost", "said"),
    [
        ("fsdp_config.json", "fsdp_config.json, which says how many shards there are, cannot be read"),
        ("huggingface/config.json", "huggingface/config.json, which says what model the weights are of, is missing"),
        ("model_world_size_2_rank_1.pt", "1 of 2 shards are missing, model_world_size_2_rank_1.pt first"),
    ],
)
def test_what_a_merge_would_lack_is_said_before_it_begins(tmp_path: Path, lost: str, said: str) -> None:
    actor = checkpoint(tmp_path, 1, world_size=2) / "actor"
    # A config without weights is no model: the ranks' shards must be joined.
    (actor / "huggingface/model.safetensors").unlink()
    (actor / lost).unlink()
    with pytest.raises(VerlWorkflowError, match=said) as caught:
        exported(tmp_path, tmp_path / "model")
    assert caught.value.code is ErrorCode.MODEL_INVALID
    assert not caught.value.retryable
    assert not (tmp_path / "log").exists()
    assert not (tmp_path / "model").exists()
    assert not (tmp_path / "model.partial").exists()


def test_a_failed_merge_says_why_and_leaves_nothing(tmp_path: Path) -> None:
    folder = checkpoint(tmp_path, 1)
    (folder / "actor/huggingface/model.safetensors").unlink()
    shutil.copy(folder / "data.pt", folder / "actor/model_world_size_1_rank_0.pt")
    with pytest.raises(VerlWorkflowError, match="could not be merged") as caught:
        exported(tmp_path, tmp_path / "model")
    assert caught.value.code is ErrorCode.TRAINING_FAILED
    assert not (tmp_path / "model").exists()
    assert not (tmp_path / "model.partial").exists()
