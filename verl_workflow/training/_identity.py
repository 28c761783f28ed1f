"""What a checkpoint folder belongs to: resuming anything else from it would train nonsense without an error."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from verl_workflow.errors import ErrorCode, VerlWorkflowError

_FILE = "identity.json"
# Settings of verl that decide what is in a checkpoint's files, or what its data state counts.
_BOUND_SETTINGS = (
    "actor_rollout_ref.actor.optim.optimizer",
    "actor_rollout_ref.actor.strategy",
    "actor_rollout_ref.model.lora_rank",
    "critic.optim.optimizer",
    "critic.strategy",
    "critic.model.lora_rank",
    "data.shuffle",
    "data.train_batch_size",
)
_WHY = {
    "world_size": "verl's checkpoints are bound to the number of GPUs: use that number.",
    "model": "A run's definition cannot change: use that model.",
}


def bound_settings(chosen: Mapping[str, Any]) -> dict[str, Any]:
    """Those of verl's settings that a checkpoint is bound to; None where verl's own value is in force."""
    return {key: chosen.get(key) for key in _BOUND_SETTINGS}


def difference(recorded: Mapping[str, Any], identity: Mapping[str, Any]) -> str | None:
    """The first thing in which the two differ: ``another world size: 4, not 8``; None when there is none.

    A setting of verl that is not recorded is taken to be the same.
    """
    name = _differing(recorded, identity)
    if name is None:
        return None
    return f"another {name if '.' in name else name.replace('_', ' ')}: {recorded.get(name)}, not {identity[name]}"


def bind(checkpoint_dir: Path, identity: Mapping[str, Any]) -> None:
    """Tie the folder to what trains in it, on first use.

    Raises:
        VerlWorkflowError: CHECKPOINT_INVALID when the folder belongs to something else.
    """
    path = checkpoint_dir / _FILE
    if not path.exists():
        _create(path, identity)
    found = json.loads(path.read_text(encoding="utf-8"))
    if other := difference(found, identity):
        why = _WHY.get(_differing(found, identity) or "", "A run cannot change what it trains.")
        raise VerlWorkflowError(
            ErrorCode.CHECKPOINT_INVALID,
            f"the checkpoints were made with {other}",
            where=str(checkpoint_dir),
            remedy=f"{why} {way_on(checkpoint_dir)}",
        )


def recorded(checkpoint_dir: Path) -> Mapping[str, Any]:
    """What the folder is tied to; empty when it is tied to nothing that can be read."""
    try:
        found = json.loads((checkpoint_dir / _FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def way_on(checkpoint_dir: Path) -> str:
    """How to train these weights further in a new pipeline, where nothing but the weights is taken over.

    Args:
        checkpoint_dir: ``<artifacts>/runs/<run>/stages/<stage>/checkpoints``.
    """
    exported = [config.parent for config in sorted(checkpoint_dir.parent.glob("attempts/*/model/config.json"))]
    saved = sorted(
        checkpoint_dir.glob("global_step_*/actor"), key=lambda actor: int(actor.parent.name.rsplit("_", 1)[1])
    )
    ready = [actor / "huggingface" for actor in saved if list((actor / "huggingface").glob("*.safetensors"))]
    merged = checkpoint_dir.parent / "model"
    before = ""
    if found := [*ready, *exported]:
        merged = found[-1]
    elif saved:
        before = (
            f"run `python -m verl.model_merger merge --backend fsdp --local_dir {saved[-1]} --target_dir {merged}` and "
        )
    else:
        return "Or start a new run."
    return (
        f"Or train its weights on, without optimizer and data order: {before}write "
        f"`model: {{path: {merged}}}` in a new pipeline."
    )


def _differing(recorded: Mapping[str, Any], identity: Mapping[str, Any]) -> str | None:
    for name, value in identity.items():
        if recorded.get(name, value if "." in name else None) != value:
            return name
    return None


def _create(path: Path, identity: Mapping[str, Any]) -> None:
    """Put-if-absent with the whole content: a hard link fails when another process was first."""
    partial = path.with_name(f"{path.name}.{os.getpid()}")
    partial.write_text(json.dumps(dict(identity), indent=1), encoding="utf-8")
    try:
        os.link(partial, path)
    except FileExistsError:
        pass
    finally:
        partial.unlink()
