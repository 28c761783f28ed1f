"""A version's files: copied, checked, and in place all at once."""

from __future__ import annotations

import os
import re
import shutil
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from verl_workflow.artifacts import Artifact, file_digest
from verl_workflow.durable_files import flush_folder
from verl_workflow.errors import ErrorCode, VerlWorkflowError
from verl_workflow.registry._records import FileRecord


@contextmanager
def copied(
    source: Artifact, parent: Path, label: str, attempt: int, check: Callable[[Path, Path], None]
) -> Iterator[Path]:
    """A checked copy of the folder `source` below `parent`, removed afterwards unless it was moved to its place.

    It shares nothing with the source, is flushed to disk, has been compared by digest and given to
    `check(source, copy)`. What died attempts left under the same label is removed first.

    Raises:
        VerlWorkflowError: MODEL_INVALID, the source is not what was recorded; STORAGE, the copy is not the source.
    """
    parent.mkdir(parents=True, exist_ok=True)
    _sweep(parent, label, attempt)
    partial = parent / f".{label}-{attempt}-{uuid.uuid4().hex[:8]}.partial"
    try:
        for file in _files(source.path):
            copy = partial / file.relative_to(source.path)
            copy.parent.mkdir(parents=True, exist_ok=True)
            _copy(file, copy)
        if not holds(partial, source.sha256):
            raise _unlike(source)
        check(source.path, partial)
        for folder in (partial, *(entry for entry in partial.rglob("*") if entry.is_dir())):
            flush_folder(folder)
        yield partial
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def put(partial: Path, target: Path, sha256: str) -> None:
    """Rename `partial` to `target`; another writer's same content may win, damaged content is put out of the way."""
    try:
        partial.rename(target)
    except OSError:
        if not target.is_dir():
            raise
        if holds(target, sha256):
            return
        old = partial.with_name(partial.name + ".old")
        target.rename(old)
        partial.rename(target)
        shutil.rmtree(old, ignore_errors=True)
    flush_folder(target.parent)


def holds(folder: Path, sha256: str) -> bool:
    """Whether the folder is there with this content."""
    return folder.is_dir() and Artifact.of(folder).sha256 == sha256


def records(folder: Path) -> dict[str, FileRecord]:
    """Every file below `folder`, by relative path."""
    return {
        file.relative_to(folder).as_posix(): FileRecord(sha256=file_digest(file), bytes=file.stat().st_size)
        for file in _files(folder)
    }


def differences(folder: Path, expected: Mapping[str, FileRecord], *, contents: bool = True) -> list[str]:
    """What is missing, changed or too much in `folder`, one phrase a file; empty when it is as recorded.

    Args:
        contents: compare digests, too, which reads all files.
    """
    found = {file.relative_to(folder).as_posix(): file for file in _files(folder)} if folder.is_dir() else {}
    missing = [f"{name} is missing" for name in expected if name not in found]
    changed = [
        f"{name} has changed ({size} bytes, {record.bytes} recorded)"
        for name, record in expected.items()
        if name in found
        and (
            (size := found[name].stat().st_size) != record.bytes
            or (contents and file_digest(found[name]) != record.sha256)
        )
    ]
    return sorted(missing + changed) + sorted(f"{name} is too much" for name in found if name not in expected)


def _files(folder: Path) -> list[Path]:
    return sorted(entry for entry in folder.rglob("*") if entry.is_file())


def _copy(source: Path, target: Path) -> None:
    with source.open("rb") as reader, target.open("wb") as writer:
        shutil.copyfileobj(reader, writer, 1 << 20)
        writer.flush()
        os.fsync(writer.fileno())


def _sweep(parent: Path, label: str, attempt: int) -> None:
    """Remove what earlier attempts left: they are dead, or about to be told so."""
    name = re.compile(rf"\.{re.escape(label)}-(\d+)-[0-9a-f]+\.partial(\.old)?")
    for entry in parent.iterdir():
        match = name.fullmatch(entry.name)
        if match is not None and int(match.group(1)) < attempt:
            shutil.rmtree(entry, ignore_errors=True)


def _unlike(source: Artifact) -> VerlWorkflowError:
    if holds(source.path, source.sha256):
        return VerlWorkflowError(
            ErrorCode.STORAGE,
            "the copy of the model is not its source, byte for byte",
            where=str(source.path),
            remedy="Check the file system of the registry for errors.",
            retryable=True,
        )
    return VerlWorkflowError(
        ErrorCode.MODEL_INVALID,
        f"the model's files are not those that were evaluated: sha256 {source.sha256[:12]} was recorded",
        where=str(source.path),
        remedy="Something has changed the folder since: start a new run.",
    )
