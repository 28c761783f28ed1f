"""What a checkpoint folder belongs to: resuming anything else from it would train nonsense without an error."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from verl_workflow.errors import ErrorCode, VerlWorkflowError

_FILE = "identity.json"
_REMEDY = {
    "world_size": "verl's checkpoints are bound to the number of GPUs: use that number, or start a new run from the "
    "exported model of this one.",
}


def bind(checkpoint_dir: Path, identity: Mapping[str, Any]) -> None:
    """Tie the folder to what trains in it, on first use.

    Raises:
        VerlWorkflowError: CHECKPOINT_INVALID when the folder belongs to something else.
    """
    path = checkpoint_dir / _FILE
    if not path.exists():
        _create(path, identity)
    recorded = json.loads(path.read_text(encoding="utf-8"))
    for name, value in identity.items():
        if recorded.get(name) != value:
            raise VerlWorkflowError(
                ErrorCode.CHECKPOINT_INVALID,
                f"the checkpoints were made with another {name.replace('_', ' ')}: {recorded.get(name)}",
                where=str(checkpoint_dir),
                value=value,
                remedy=_REMEDY.get(name, "Start a new run; this one's definition cannot change."),
            )


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
