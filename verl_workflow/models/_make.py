"""The model a pipeline starts from, as a folder in Hugging Face format, made once."""

from __future__ import annotations

import hashlib
import json
import shutil
import uuid
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING

from verl_workflow.artifacts import Artifact, file_digest
from verl_workflow.errors import VerlWorkflowError
from verl_workflow.models import _gguf, _tiny
from verl_workflow.models._check import check_folder

if TYPE_CHECKING:
    from verl_workflow.spec import Model


def make_model(spec: Model, root: Path, base_dir: Path) -> Artifact:
    """The model named by `spec`, made below ``<root>/models`` unless it is there; a `path` is used where it lies.

    Args:
        root: folder for bulk data. base_dir: folder of the pipeline file, where relative paths start.

    Guarantees:
        What is made is complete when it appears under its name, is the same bytes each time with the same versions of
        transformers, and is checked against its recorded digest before it is used again.

    Raises:
        UserError: MODEL_INVALID, FILE_MISSING or DEPENDENCY_MISSING.
    """
    if spec.path is not None:
        folder = (base_dir / Path(spec.path).expanduser()).resolve()
        check_folder(folder)
        return Artifact.of(folder)
    tools = f"transformers-{version('transformers')}"
    if spec.builtin is not None:
        return _made(root, spec.builtin, f"{tools} {_tiny.RECIPE}", _tiny.write_tiny)
    assert spec.gguf is not None, "one source is given, as the spec checks"
    file = _gguf.find_gguf(spec.gguf, base_dir)
    recipe = f"{tools} {_gguf.RECIPE} {file_digest(file)}"
    return _made(root, file.stem, recipe, lambda folder: _gguf.write_from_gguf(file, folder))


def _made(root: Path, stem: str, recipe: str, write: Callable[[Path], None]) -> Artifact:
    """What `write` writes, at ``models/<stem>-<digest of recipe>``, taken as it is when it still matches its record."""
    from filelock import FileLock

    folder = (Path(root) / "models" / f"{stem}-{hashlib.sha256(recipe.encode()).hexdigest()[:8]}").absolute()
    record = folder.with_name(folder.name + ".json")
    ready = _matching(folder, record)
    if ready is not None:
        return ready
    folder.parent.mkdir(parents=True, exist_ok=True)
    # One maker at a time; the lock ends with its holder's process, however that ends.
    with FileLock(folder.with_name(f".{folder.name}.lock")):
        return _matching(folder, record) or _make(folder, record, recipe, write)


def _make(folder: Path, record: Path, recipe: str, write: Callable[[Path], None]) -> Artifact:
    partial = folder.with_name(f"{folder.name}.partial-{uuid.uuid4().hex[:8]}")
    partial.mkdir()
    try:
        write(partial)
        for file in partial.iterdir():
            # safetensors makes files that only their owner may read; other nodes may run as others.
            file.chmod(0o644)
        check_folder(partial)
        made = Artifact.of(partial)
        # The record first: a folder without one would never be trusted, a record without its folder does no harm.
        draft = partial.with_name(partial.name + ".json")
        draft.write_text(json.dumps({"recipe": recipe, "sha256": made.sha256, "bytes": made.bytes}))
        draft.replace(record)
        if folder.exists():
            # Damaged: out of the way in one step, then gone.
            old = folder.with_name(f"{partial.name}-old")
            folder.rename(old)
            shutil.rmtree(old, ignore_errors=True)
        partial.rename(folder)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return Artifact(path=folder, sha256=made.sha256, bytes=made.bytes)


def _matching(folder: Path, record: Path) -> Artifact | None:
    if not folder.is_dir():
        return None
    try:
        expected = json.loads(record.read_text())["sha256"]
        # It may be damaged, and replaced by another run while it is read.
        found = Artifact.of(folder)
    except (OSError, ValueError, KeyError, VerlWorkflowError):
        return None
    return found if found.sha256 == expected else None
