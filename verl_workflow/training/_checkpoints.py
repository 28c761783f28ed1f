"""Which of verl's checkpoints can be trusted.

verl writes a checkpoint file by file and names it in a tracker that is not atomic, so a kill leaves anything.
A checkpoint counts here only when each rank's files are there and readable, and match the manifest written after
the save.
"""

from __future__ import annotations

import json
import re
import shutil
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from verl_workflow.errors import ErrorCode, VerlWorkflowError

_STEP = re.compile(r"global_step_(\d+)")
_SHARDS = ("model", "optim", "extra_state")
_MANIFEST = "manifest.json"
# Up to this size each byte is checked against its CRC; above, the archive's directory and length.
_CRC_LIMIT = 256 << 20


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """A checkpoint folder of verl: ``<root>/global_step_<step>``."""

    step: int
    path: Path


def write_manifest(checkpoint: Path) -> None:
    """Record names and sizes of all files of a finished save, atomically."""
    files = {
        entry.relative_to(checkpoint).as_posix(): entry.stat().st_size
        for entry in sorted(checkpoint.rglob("*"))
        if entry.is_file() and entry.name != _MANIFEST
    }
    partial = checkpoint / f"{_MANIFEST}.partial"
    partial.write_text(json.dumps({"files": files}, indent=1), encoding="utf-8")
    partial.replace(checkpoint / _MANIFEST)


def checkpoints(root: Path) -> list[Checkpoint]:
    """All checkpoint folders in `root`, whole or not, by step."""
    if not root.is_dir():
        return []
    found = [
        Checkpoint(step=int(match.group(1)), path=entry)
        for entry in root.iterdir()
        if entry.is_dir() and (match := _STEP.fullmatch(entry.name))
    ]
    return sorted(found, key=lambda checkpoint: checkpoint.step)


def fault(checkpoint: Checkpoint, *, world_size: int, roles: Sequence[str]) -> str | None:
    """Why the checkpoint cannot be resumed from, or None when it can.

    Args:
        world_size: ranks the training runs on; verl's FSDP files are bound to it.
        roles: ``actor``, and ``critic`` for PPO.
    """
    for role in roles:
        folder = checkpoint.path / role
        if not folder.is_dir():
            return f"{role}/ is missing"
        for shard in _SHARDS:
            for rank in range(world_size):
                name = f"{shard}_world_size_{world_size}_rank_{rank}.pt"
                if reason := _unreadable(folder / name):
                    return f"{role}/{name} {reason}"
        try:
            json.loads((folder / "fsdp_config.json").read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return f"{role}/fsdp_config.json is missing or no JSON"
    if reason := _unreadable(checkpoint.path / "data.pt"):
        return f"data.pt {reason}"
    return _against_manifest(checkpoint.path)


def newest_valid(root: Path, *, world_size: int, roles: Sequence[str]) -> Checkpoint | None:
    """The newest checkpoint that can be resumed from, or None."""
    for checkpoint in reversed(checkpoints(root)):
        if fault(checkpoint, world_size=world_size, roles=roles) is None:
            return checkpoint
    return None


def quarantine(checkpoint: Checkpoint) -> Path:
    """Move a broken checkpoint aside, to ``broken-global_step_<step>[-n]``, so that nothing resumes from it."""
    target = checkpoint.path.with_name(f"broken-{checkpoint.path.name}")
    count = 1
    while target.exists():
        count += 1
        target = checkpoint.path.with_name(f"broken-{checkpoint.path.name}-{count}")
    checkpoint.path.rename(target)
    return target


def tidy(root: Path, *, world_size: int, roles: Sequence[str], keep: int) -> Checkpoint | None:
    """Leave only the newest `keep` checkpoints that can be resumed from; return the newest of them, or None.

    Broken ones are quarantined; the empty folders that verl's own pruning leaves are removed. Call it only while
    nothing trains in `root`.
    """
    valid: list[Checkpoint] = []
    for checkpoint in checkpoints(root):
        if not (checkpoint.path / roles[0]).exists():
            shutil.rmtree(checkpoint.path)
        elif fault(checkpoint, world_size=world_size, roles=roles) is None:
            valid.append(checkpoint)
        else:
            quarantine(checkpoint)
    for checkpoint in valid[:-keep]:
        shutil.rmtree(checkpoint.path)
    return valid[-1] if valid else None


def require_space(root: Path, *, model_bytes: int) -> None:
    """Raise VerlWorkflowError(STORAGE) unless the disk below `root` can take two more checkpoints.

    A checkpoint is as large as the newest one there; before the first it is at least the model's weights four times
    over (weights, two moments of the optimizer, and a copy for the export).
    """
    found = checkpoints(root)
    size = _size(found[-1].path) if found else 4 * model_bytes
    free = shutil.disk_usage(root).free
    if free < 2 * size:
        raise VerlWorkflowError(
            ErrorCode.STORAGE,
            f"the disk has {free / 1e9:.1f} GB free and two checkpoints need about {2 * size / 1e9:.1f} GB",
            where=str(root),
            remedy="Free some space, or give the run other storage.",
        )


def _size(folder: Path) -> int:
    return sum(entry.stat().st_size for entry in folder.rglob("*") if entry.is_file())


def _unreadable(path: Path) -> str | None:
    """Why a file written by torch.save cannot be read, judged by its zip structure, without torch."""
    try:
        size = path.stat().st_size
    except OSError:
        return "is missing"
    if size == 0:
        return "is empty"
    try:
        with zipfile.ZipFile(path) as archive:
            damaged = archive.testzip() if size <= _CRC_LIMIT else None
            if damaged is not None or not archive.namelist():
                return "is damaged"
    except (zipfile.BadZipFile, OSError, EOFError, NotImplementedError):
        return "is cut off or no torch archive"
    return None


def _against_manifest(checkpoint: Path) -> str | None:
    path = checkpoint / _MANIFEST
    if not path.exists():
        # Killed between the last file and the manifest, or saved under a callback of the user's own: what could be
        # checked without it was in order.
        return None
    try:
        files = json.loads(path.read_text(encoding="utf-8"))["files"].items()
    except (OSError, ValueError, KeyError, AttributeError):
        return f"{_MANIFEST} is damaged"
    for name, size in files:
        try:
            if (checkpoint / name).stat().st_size != size:
                return f"{name} has changed its size since it was saved"
        except OSError:
            return f"{name} is missing"
    return None
