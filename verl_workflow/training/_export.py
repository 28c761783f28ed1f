"""From a checkpoint of verl to a folder that `transformers` loads."""

from __future__ import annotations

import json
import os
import shutil
import struct
import sys
from collections import Counter
from pathlib import Path
from typing import Any

from verl_workflow.errors import ErrorCode, VerlWorkflowError
from verl_workflow.training._checkpoints import Checkpoint
from verl_workflow.training._process import ChildProcess, tail

_DTYPES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16", "F64": "float64"}


def export(checkpoint: Checkpoint, target: Path, *, log: Path, timeout: float = 3600.0) -> None:
    """Put the actor of `checkpoint` into `target` as weights, config and tokenizer in Hugging Face format.

    The folder appears whole or not at all. Weights that the checkpoint holds in that format (``hf_model`` in
    ``save_contents``) are copied; otherwise verl's merger joins the ranks' shards, as bfloat16, in a process of its
    own.

    Args:
        log: takes the merger's output.
        timeout: seconds for the merger.

    Raises:
        VerlWorkflowError: MODEL_INVALID when the result is not whole, TRAINING_FAILED when the merger fails.
    """
    actor = checkpoint.path / "actor"
    partial = target.with_name(f"{target.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    try:
        if list((actor / "huggingface").glob("*.safetensors")):
            shutil.copytree(actor / "huggingface", partial)
        else:
            _require_mergeable(actor)
            _merge(actor, partial, log=log, timeout=timeout)
        _complete(partial)
        shutil.rmtree(target, ignore_errors=True)
        partial.rename(target)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _require_mergeable(actor: Path) -> None:
    """What verl's merger would stumble over, some of it only after it has read all shards."""
    try:
        ranks = int(json.loads((actor / "fsdp_config.json").read_text(encoding="utf-8"))["world_size"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise _unmergeable(
            actor, f"fsdp_config.json, which says how many shards there are, cannot be read: {error}"
        ) from error
    wanted = [f"model_world_size_{ranks}_rank_{rank}.pt" for rank in range(ranks)]
    if missing := [name for name in wanted if not (actor / name).is_file()]:
        raise _unmergeable(actor, f"{len(missing)} of {ranks} shards are missing, {missing[0]} first")
    if not (actor / "huggingface" / "config.json").is_file():
        raise _unmergeable(actor, "huggingface/config.json, which says what model the weights are of, is missing")


def _merge(actor: Path, target: Path, *, log: Path, timeout: float) -> None:
    command = [
        *(sys.executable, "-m", "verl.model_merger", "merge", "--backend", "fsdp"),
        *("--local_dir", str(actor), "--target_dir", str(target)),
    ]
    # No accelerator is needed to join files, and the cluster's may be in use.
    env = {**os.environ, "HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": ""}
    with ChildProcess(command, env=env, log=log) as child:
        code = child.wait(timeout)
    if code != 0:
        raise VerlWorkflowError(
            ErrorCode.TRAINING_FAILED,
            "the checkpoint could not be merged into one model: "
            + ("it took too long" if code is None else f"exit code {code}"),
            where=str(actor),
            remedy=f"The merger's last words:\n{tail(log, 15)}",
            retryable=code is None or code < 0,
        )
    # The merger leaves config and tokenizer where verl saved them.
    for source in sorted((actor / "huggingface").iterdir()):
        if source.is_file() and not (target / source.name).exists():
            shutil.copy2(source, target / source.name)


def _complete(folder: Path) -> None:
    """Check that all weights are there, and make the config tell their true type."""
    dtypes: Counter[str] = Counter()
    for path in _weight_files(folder):
        header = _header(path)
        dtypes.update(entry["dtype"] for entry in header.values())
    if not dtypes:
        raise _invalid(folder, "there are no weights")
    config_path = folder / "config.json"
    try:
        config = dict(json.loads(config_path.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError) as error:
        raise _invalid(folder, f"config.json cannot be read: {error}") from error
    dtype = dtypes.most_common(1)[0][0]
    config.pop("torch_dtype", None)
    config["dtype"] = _DTYPES.get(dtype, config.get("dtype", "float32"))
    config_path.write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    if not list(folder.glob("tokenizer*")):
        raise _invalid(folder, "there is no tokenizer")


def _weight_files(folder: Path) -> list[Path]:
    index = folder / "model.safetensors.index.json"
    if not index.exists():
        return sorted(folder.glob("*.safetensors"))
    try:
        names = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise _invalid(folder, f"{index.name} cannot be read: {error}") from error
    return [folder / name for name in sorted(names)]


def _header(path: Path) -> dict[str, Any]:
    """The tensors of a safetensors file, after a check that its bytes are all there."""
    try:
        with path.open("rb") as stream:
            (length,) = struct.unpack("<Q", stream.read(8))
            header: dict[str, Any] = json.loads(stream.read(length))
        header.pop("__metadata__", None)
        end = max(entry["data_offsets"][1] for entry in header.values())
        if path.stat().st_size != 8 + length + end:
            raise ValueError("its length is wrong")
    except (OSError, ValueError, KeyError, struct.error) as error:
        raise _invalid(path.parent, f"{path.name} is damaged: {error}") from error
    return header


def _unmergeable(actor: Path, what: str) -> VerlWorkflowError:
    return VerlWorkflowError(
        ErrorCode.MODEL_INVALID,
        f"the checkpoint cannot be merged into one model: {what}",
        where=str(actor),
        remedy="Put the file back, from another checkpoint of the same run if it is a configuration; or train from the "
        "checkpoint before.",
    )


def _invalid(folder: Path, what: str) -> VerlWorkflowError:
    return VerlWorkflowError(
        ErrorCode.MODEL_INVALID,
        f"the exported model is not whole: {what}",
        where=str(folder),
        remedy="Run the stage again; the checkpoint is kept.",
        retryable=True,
    )
