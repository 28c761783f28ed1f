"""Which of verl's checkpoints can be trusted.

verl writes a checkpoint file by file and names it in a tracker that is not atomic, so a kill leaves anything. A save
that is through gets its manifest and is moved, whole, to where checkpoints are looked for; there it counts only when
each rank's files are readable and match the manifest, and the manifest says that this training has saved it. The
tracker is never asked.
"""

from __future__ import annotations

import contextlib
import json
import re
import shutil
import time
import zipfile
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from verl_workflow.errors import ErrorCode, VerlWorkflowError
from verl_workflow.training._discard import discard, finish_discarding, half_discarded
from verl_workflow.training._identity import difference
from verl_workflow.training._owner import half_saved

_STEP = re.compile(r"global_step_(\d+)")
_SHARDS = ("model", "optim", "extra_state")
_MANIFEST = "manifest.json"
_PARTIAL = f"{_MANIFEST}.partial"
_BROKEN = "broken-"
# Up to this size each byte is checked against its CRC; above, the archive's directory and length.
_CRC_LIMIT = 256 << 20
# Up to this size a file that is no archive is read to be recognised.
_SMALL = 64 << 20


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """A checkpoint folder of verl: ``<root>/global_step_<step>``."""

    step: int
    path: Path


def write_manifest(
    checkpoint: Path, *, writer: str | None = None, identity: Mapping[str, Any] | None = None, roles: Sequence[str] = ()
) -> None:
    """Record what a finished save is, with names, sizes and checksums of all its files, atomically.

    Args:
        writer: the attempt that saved it. identity: what it is bound to. roles: whose weights it holds.
    """
    facts = {
        "step": _step(checkpoint),
        "writer": writer,
        "saved": time.time(),
        "roles": list(roles),
        "identity": dict(identity or {}),
        "files": {
            entry.relative_to(checkpoint).as_posix(): {"bytes": entry.stat().st_size, "crc": _checksum(entry)}
            for entry in sorted(checkpoint.rglob("*"))
            if entry.is_file() and entry.name not in {_MANIFEST, _PARTIAL}
        },
    }
    (checkpoint / _PARTIAL).write_text(json.dumps(facts, indent=1), encoding="utf-8")
    (checkpoint / _PARTIAL).replace(checkpoint / _MANIFEST)


def size_of(folder: Path) -> int:
    """Bytes of all files in it."""
    total = 0
    for entry in folder.rglob("*"):
        # Some may go while they are counted.
        with contextlib.suppress(FileNotFoundError):
            total += entry.stat().st_size if entry.is_file() else 0
    return total


def checkpoints(root: Path) -> list[Checkpoint]:
    """All checkpoint folders in `root`, whole or not, by step."""
    if not root.is_dir():
        return []
    found = [
        Checkpoint(step=step, path=entry)
        for entry in root.iterdir()
        if entry.is_dir() and (step := _step(entry)) is not None
    ]
    return sorted(found, key=lambda checkpoint: checkpoint.step)


def fault(
    checkpoint: Checkpoint, *, world_size: int, roles: Sequence[str], identity: Mapping[str, Any] | None = None
) -> str | None:
    """Why the checkpoint cannot be resumed from, in words, or None when it can.

    Args:
        world_size: ranks the training runs on; verl's FSDP files are bound to it.
        roles: ``actor``, and ``critic`` for PPO.
        identity: what the training's checkpoints are bound to.
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
    return _against_manifest(checkpoint, identity or {})


def newest_valid(
    root: Path, *, world_size: int, roles: Sequence[str], identity: Mapping[str, Any] | None = None
) -> Checkpoint | None:
    """The newest checkpoint that can be resumed from, or None."""
    for checkpoint in reversed(checkpoints(root)):
        if fault(checkpoint, world_size=world_size, roles=roles, identity=identity) is None:
            return checkpoint
    return None


def quarantine(checkpoint: Checkpoint) -> Path:
    """Move a broken checkpoint aside, to ``broken-global_step_<step>[-n]``, so that nothing resumes from it."""
    target = checkpoint.path.with_name(f"{_BROKEN}{checkpoint.path.name}")
    count = 1
    while target.exists():
        count += 1
        target = checkpoint.path.with_name(f"{_BROKEN}{checkpoint.path.name}-{count}")
    checkpoint.path.rename(target)
    return target


def set_aside(root: Path, *, since: int) -> None:
    """Quarantine all checkpoints of step `since` and later: whole as files, and not to be trained on from."""
    for checkpoint in checkpoints(root):
        if checkpoint.step >= since:
            quarantine(checkpoint)


def tidy(
    root: Path, *, world_size: int, roles: Sequence[str], identity: Mapping[str, Any] | None = None
) -> tuple[list[Checkpoint], list[str]]:
    """Leave only checkpoints that can be resumed from; those, by step, and what is wrong with the others.

    Broken ones are quarantined, of which the newest stays to be looked at; half a save or deletion is removed. Call it
    only while nothing trains in `root`.
    """
    finish_discarding(root)
    for folder in half_saved(root):
        discard(folder)
    whole: list[Checkpoint] = []
    broken: list[str] = []
    for checkpoint in checkpoints(root):
        reason = fault(checkpoint, world_size=world_size, roles=roles, identity=identity)
        if reason is None:
            whole.append(checkpoint)
        else:
            place = quarantine(checkpoint)
            broken.append(f"the checkpoint of step {checkpoint.step} was set aside as {place.name}: {reason}")
    for folder in _quarantined(root)[:-1]:
        discard(folder)
    return whole, broken


def make_room(root: Path) -> None:
    """Delete all that is of no use to a training: what is quarantined or half deleted."""
    finish_discarding(root)
    for folder in _quarantined(root):
        discard(folder)


def require_space(root: Path, *, model_bytes: int) -> None:
    """Raise VerlWorkflowError(STORAGE) unless the disk below `root` can take two more checkpoints.

    A checkpoint is as large as the newest one there; before the first it is at least the model's weights four times
    over (weights, two moments of the optimizer, and a copy for the export). What is quarantined, half saved or half
    deleted counts as free: it gives way.
    """
    found = checkpoints(root)
    size = size_of(found[-1].path) if found else 4 * model_bytes
    useless = [*_quarantined(root), *half_saved(root), *half_discarded(root)]
    free = shutil.disk_usage(root).free + sum(size_of(folder) for folder in useless)
    if free < 2 * size:
        raise VerlWorkflowError(
            ErrorCode.STORAGE,
            f"the disk has {free / 1e9:.1f} GB free and two checkpoints need about {2 * size / 1e9:.1f} GB",
            where=str(root),
            remedy="Free some space, or give the run other storage.",
        )


def _step(folder: Path) -> int | None:
    match = _STEP.fullmatch(folder.name)
    return int(match.group(1)) if match else None


def _quarantined(root: Path) -> list[Path]:
    """By when they were set aside."""
    return sorted(root.glob(f"{_BROKEN}*"), key=lambda folder: folder.stat().st_ctime_ns)


def _checksum(path: Path) -> int | None:
    """Of an archive by torch.save, over the checksums of its parts; of a small file over its bytes; else None."""
    try:
        with zipfile.ZipFile(path) as archive:
            parts = [(part.filename, part.CRC, part.file_size) for part in archive.infolist()]
            return zlib.crc32(repr(parts).encode())
    except (zipfile.BadZipFile, OSError, EOFError, NotImplementedError):
        return zlib.crc32(path.read_bytes()) if path.stat().st_size <= _SMALL else None


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


def _against_manifest(checkpoint: Checkpoint, identity: Mapping[str, Any]) -> str | None:
    try:
        manifest = json.loads((checkpoint.path / _MANIFEST).read_text(encoding="utf-8"))
        files, step, made_with = dict(manifest["files"]), manifest["step"], dict(manifest["identity"])
    except FileNotFoundError:
        return f"{_MANIFEST} is missing: nobody has seen the save through"
    except (OSError, ValueError, KeyError, TypeError):
        return f"{_MANIFEST} is damaged"
    if step != checkpoint.step:
        return f"it is of step {step}, not {checkpoint.step}"
    if other := difference(made_with, identity):
        return f"it was made with {other}"
    return next(_changed(checkpoint.path, files), None)


def _changed(folder: Path, files: Mapping[str, Any]) -> Iterator[str]:
    """What is not as it was when the files were recorded."""
    for name, recorded in files.items():
        try:
            if (folder / name).stat().st_size != recorded["bytes"]:
                yield f"{name} has changed its size since it was saved"
            elif recorded["crc"] is not None and _checksum(folder / name) != recorded["crc"]:
                yield f"{name} has changed since it was saved"
        except OSError:
            yield f"{name} is missing"
        except (KeyError, TypeError):
            yield f"{_MANIFEST} is damaged"
