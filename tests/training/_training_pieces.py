"""Stages and files as the training part meets them."""

from __future__ import annotations

import json
import struct
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from verl_workflow.errors import VerlWorkflowError
from verl_workflow.spec._training import VerlStage
from verl_workflow.training._checkpoints import write_manifest


def stage(**changes: Any) -> VerlStage:
    """A small GRPO stage."""
    return VerlStage(
        **{
            "name": "train",
            "train": "train.parquet",
            "validation": "validation.parquet",
            "reward": {"function": "reward.py:score"},
            "steps": 6,
            "batch_size": 8,
            "rollouts": 2,
            "max_prompt_length": 64,
            "max_response_length": 8,
            "save_every": 2,
            **changes,
        }
    )


def torch_archive(path: Path, content: bytes = b"weights") -> None:
    """A file with the structure torch.save gives it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("archive/data.pkl", content)


def safetensors(path: Path, dtype: str = "F32") -> None:
    """One tensor of two numbers."""
    width = {"F32": 4, "BF16": 2}[dtype]
    header = json.dumps({"w": {"dtype": dtype, "shape": [2], "data_offsets": [0, 2 * width]}}).encode()
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(struct.pack("<Q", len(header)) + header + bytes(2 * width))


def checkpoint(root: Path, step: int, roles: tuple[str, ...] = ("actor",), world_size: int = 1) -> Path:
    """A whole checkpoint as verl leaves it, but for the manifest."""
    folder = root / f"global_step_{step}"
    for role in roles:
        for shard in ("model", "optim", "extra_state"):
            for rank in range(world_size):
                torch_archive(folder / role / f"{shard}_world_size_{world_size}_rank_{rank}.pt")
        (folder / role / "fsdp_config.json").write_text(json.dumps({"FSDP_version": 2, "world_size": world_size}))
    exported = folder / "actor" / "huggingface"
    safetensors(exported / "model.safetensors")
    (exported / "config.json").write_text(json.dumps({"model_type": "qwen2", "dtype": "bfloat16"}))
    (exported / "tokenizer.json").write_text("{}")
    torch_archive(folder / "data.pt")
    return folder


def saved(root: Path, *steps: int, **changes: Any) -> None:
    """Whole checkpoints with their manifests."""
    for step in steps:
        write_manifest(checkpoint(root, step, **changes), writer="1.1")


def failure(run: Callable[..., Any], *arguments: Any, **changes: Any) -> VerlWorkflowError:
    with pytest.raises(VerlWorkflowError) as caught:
        run(*arguments, **changes)
    return caught.value


def launched(tmp_path: Path, attempt: int) -> Any:
    folder = tmp_path / "storage/runs/run/stages/train/attempts" / f"{attempt:03d}"
    path = folder / "launch.json"
    return json.loads(path.read_text())["settings"] if path.exists() else None
