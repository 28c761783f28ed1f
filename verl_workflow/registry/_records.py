"""What the registry stores, as JSON and as classes."""

from __future__ import annotations

import json
import re
import reprlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from verl_workflow.artifacts import Artifact
from verl_workflow.errors import ErrorCode, VerlWorkflowError
from verl_workflow.stored_json import parse_json

FORMAT = 1
VERSION = re.compile(r"v[0-9]{4,}")


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
        parent: sha256 of the model it was trained from. extends: ``run/stage`` whose last checkpoint that training went
            on from. champion: the version it was evaluated against.
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
    extends: str | None = None
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
    def from_json(cls, data: Mapping[str, Any], path: Path, key: str) -> ModelVersion:
        """The manifest that `to_json` wrote.

        Args:
            path: where the files lie now; the folder may be mounted elsewhere than where it was written.
            key: of the record, for messages.

        Raises:
            VerlWorkflowError(STORAGE): it is not as it was written.
        """
        check = _Checked(data, key)
        artifact, lineage = (_Checked(check.field(name, dict), f"{key}: {name}") for name in ("artifact", "lineage"))
        files = {name: _Checked(record, f"{key}: {name}") for name, record in check.field("files", dict).items()}
        return cls(
            model=check.field("model", str),
            version=check.field("version", str),
            artifact=Artifact(path=path, sha256=artifact.field("sha256", str), bytes=artifact.field("bytes", int)),
            files={
                name: FileRecord(sha256=record.field("sha256", str), bytes=record.field("bytes", int))
                for name, record in files.items()
            },
            lineage=Lineage(
                run=lineage.field("run", str),
                stage=lineage.field("stage", str),
                epoch=lineage.field("epoch", int, 0),
                attempt=lineage.field("attempt", int, 1),
                **{
                    name: lineage.field(name, str, None)
                    for name in ("pipeline", "config", "code", "parent", "extends", "champion")
                },
                data=lineage.texts("data"),
                versions=lineage.texts("versions"),
            ),
            evaluation=check.field("evaluation", dict),
            created_at=check.field("created_at", str),
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
    def from_json(cls, data: Mapping[str, Any], key: str) -> AliasRecord:
        """The record that `to_json` wrote. Raises VerlWorkflowError(STORAGE), naming `key`, when it is another."""
        check = _Checked(data, key)
        version = check.field("version", str)
        if VERSION.fullmatch(version) is None:
            raise damaged(key, f"the version of the registry's record is {reprlib.repr(version)}")
        return cls(
            number=check.field("number", int),
            model=check.field("model", str),
            alias=check.field("alias", str),
            version=version,
            rollback=check.field("rollback", bool, False),
            run=check.field("run", str, None),
            stage=check.field("stage", str, None),
            epoch=check.field("epoch", int, 0),
            token=check.field("token", str),
            at=check.field("at", str),
        )


_NEEDED = object()


@dataclass(frozen=True)
class _Checked:
    """A stored object whose fields are read by their types; `key` is its place."""

    data: Any
    key: str

    def field(self, name: str, kind: type, default: Any = _NEEDED) -> Any:
        """The field; with a default it may be missing, and with None as the default it may be null."""
        value = self.data.get(name, default) if isinstance(self.data, dict) else None
        if value is None and default is None:
            return None
        if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
            shown = "missing" if value is _NEEDED else reprlib.repr(value)
            raise damaged(self.key, f"{name} of the registry's record is {shown}")
        return value

    def texts(self, name: str) -> dict[str, str]:
        """A field with texts by name, which may be missing."""
        found: dict[str, str] = self.field(name, dict, {})
        return {entry: _Checked(found, f"{self.key}: {name}").field(entry, str) for entry in found}


def dump(record: Mapping[str, Any]) -> bytes:
    return json.dumps(record, indent=1, sort_keys=True, allow_nan=False).encode()


def parse(data: bytes, key: str) -> dict[str, Any]:
    """A stored record. Raises VerlWorkflowError(STORAGE) when it is no record this version can read."""
    try:
        found = parse_json(data)
    except ValueError as error:
        raise damaged(key, f"the registry's record is not JSON: {error}") from error
    if not isinstance(found, dict) or found.get("format") != FORMAT:
        raise damaged(key, f"the registry's record is not in format {FORMAT}")
    return found


def damaged(key: str, what: str) -> VerlWorkflowError:
    """The error for a record that is not as it was written."""
    return VerlWorkflowError(
        ErrorCode.STORAGE, what, where=key, remedy="Restore it, or read it with the version that wrote it."
    )
