"""What the registry stores, as JSON and as classes."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from verl_workflow.artifacts import Artifact
from verl_workflow.errors import ErrorCode, VerlWorkflowError

FORMAT = 1


@dataclass(frozen=True, kw_only=True)
class FileRecord:
    """One file of a version."""

    sha256: str
    bytes: int


@dataclass(frozen=True, kw_only=True)
class Lineage:
    """Where a version comes from.

    Attributes:
        run, stage, epoch, attempt: what registered it.
        pipeline: its name. config, code: digests of the resolved pipeline and of the user's code.
        data: sha256 by name, such as ``train``, ``validation`` and ``evaluation``.
        parent: sha256 of the model it was trained from. champion: the version it was evaluated against.
        versions: of the tools that shaped it.
    """

    run: str
    stage: str
    epoch: int = 0
    attempt: int = 1
    pipeline: str | None = None
    config: str | None = None
    code: str | None = None
    data: Mapping[str, str] = field(default_factory=dict)
    parent: str | None = None
    champion: str | None = None
    versions: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class ModelVersion:
    """A registered model: its files never change.

    Attributes:
        artifact: the folder with the files.
        files: by path relative to the folder.
        evaluation: the figures it was promoted on, as plain JSON; empty when it was registered without.
        created_at: ISO 8601, UTC.
    """

    model: str
    version: str
    artifact: Artifact
    files: Mapping[str, FileRecord]
    lineage: Lineage
    evaluation: Mapping[str, Any]
    created_at: str

    @property
    def path(self) -> Path:
        """The folder, in Hugging Face format."""
        return self.artifact.path

    def to_json(self) -> dict[str, Any]:
        return {
            "format": FORMAT,
            "model": self.model,
            "version": self.version,
            "artifact": self.artifact.to_json(),
            "files": {name: asdict(record) for name, record in self.files.items()},
            "lineage": asdict(self.lineage),
            "evaluation": dict(self.evaluation),
            "created_at": self.created_at,
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any], path: Path) -> ModelVersion:
        """`path` is where the files lie now; the folder may be mounted elsewhere than where it was written."""
        artifact = data["artifact"]
        return cls(
            model=data["model"],
            version=data["version"],
            artifact=Artifact(path=path, sha256=artifact["sha256"], bytes=artifact["bytes"]),
            files={name: FileRecord(**record) for name, record in data["files"].items()},
            lineage=Lineage(**data["lineage"]),
            evaluation=data["evaluation"],
            created_at=data["created_at"],
        )


@dataclass(frozen=True, kw_only=True)
class AliasRecord:
    """One move of an alias, never changed.

    Attributes:
        number: 1, 2, ... without gaps; the highest is in force.
        version: what it points to from then on.
        rollback: whether it goes back instead of forward.
        run, stage, epoch: who moved it; `run` is None for a person.
        token: tells two writers of the same move apart.
        at: ISO 8601, UTC.
    """

    number: int
    model: str
    alias: str
    version: str
    rollback: bool = False
    run: str | None = None
    stage: str | None = None
    epoch: int = 0
    token: str
    at: str

    def to_json(self) -> dict[str, Any]:
        return {"format": FORMAT, **asdict(self)}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> AliasRecord:
        return cls(**{name: value for name, value in data.items() if name != "format"})


def dump(record: Mapping[str, Any]) -> bytes:
    return json.dumps(record, indent=1, sort_keys=True, allow_nan=False).encode()


def parse(data: bytes, key: str) -> dict[str, Any]:
    """A stored record. Raises VerlWorkflowError(STORAGE) when it is no record this version can read."""
    try:
        found = json.loads(data)
    except ValueError as error:
        raise _damaged(key, f"the registry's record is not JSON: {error}") from error
    if not isinstance(found, dict) or found.get("format") != FORMAT:
        raise _damaged(key, f"the registry's record is not in format {FORMAT}")
    return found


def _damaged(key: str, what: str) -> VerlWorkflowError:
    return VerlWorkflowError(
        ErrorCode.STORAGE, what, where=key, remedy="Restore it, or read it with the version that wrote it."
    )
