"""Files and folders named by content: what stages exchange."""

from __future__ import annotations

import hashlib
import reprlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from verl_workflow.errors import ErrorCode, VerlWorkflowError

_BLOCK = 1 << 20


@dataclass(frozen=True, kw_only=True)
class Artifact:
    """A file or folder on the shared file system, complete and digested.

    Attributes:
        path: absolute path.
        sha256: of the bytes for a file; for a folder, of its sorted ``<relative path>\\0<sha256>`` lines, so
            that the digest does not depend on where the folder lies.
        bytes: total size.
    """

    path: Path
    sha256: str
    bytes: int

    @classmethod
    def of(cls, path: Path) -> Artifact:
        """Digest what is at `path` now. Raises VerlWorkflowError(FILE_MISSING) when nothing is there."""
        path = Path(path).absolute()
        if path.is_file():
            return cls(path=path, sha256=file_digest(path), bytes=path.stat().st_size)
        if not path.is_dir():
            raise VerlWorkflowError(
                ErrorCode.FILE_MISSING,
                "the artifact does not exist",
                where=str(path),
                remedy="Restore the file, or run the stage that makes it again.",
            )
        files = sorted(entry for entry in path.rglob("*") if entry.is_file())
        digest = hashlib.sha256()
        for entry in files:
            digest.update(f"{entry.relative_to(path).as_posix()}\0{file_digest(entry)}\n".encode())
        return cls(path=path, sha256=digest.hexdigest(), bytes=sum(entry.stat().st_size for entry in files))

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Artifact:
        """Raises VerlWorkflowError(DATA_INVALID) for what `to_json` cannot have written."""
        for name, kind in (("path", str), ("sha256", str), ("bytes", int)):
            if not isinstance(data.get(name), kind):
                raise VerlWorkflowError(
                    ErrorCode.DATA_INVALID,
                    f"its {name} does not describe an artifact",
                    value=reprlib.repr(data.get(name)),
                    remedy="Run the stage that made it again.",
                )
        return cls(path=Path(data["path"]), sha256=data["sha256"], bytes=data["bytes"])

    def to_json(self) -> dict[str, Any]:
        return {"path": str(self.path), "sha256": self.sha256, "bytes": self.bytes}

    def verify(self) -> None:
        """Raise VerlWorkflowError(FILE_MISSING or DATA_INVALID) unless the content is there and unchanged."""
        found = Artifact.of(self.path)
        if found.sha256 != self.sha256:
            raise VerlWorkflowError(
                ErrorCode.DATA_INVALID,
                f"the artifact has changed: sha256 {self.sha256[:12]} was recorded",
                where=str(self.path),
                value=found.sha256[:12],
                remedy="Restore the recorded content, or start a new run.",
            )


def file_digest(path: Path) -> str:
    """SHA-256 of a file, read in blocks of 1 MiB."""
    digest = hashlib.sha256()
    with Path(path).open("rb") as stream:
        while block := stream.read(_BLOCK):
            digest.update(block)
    return digest.hexdigest()
