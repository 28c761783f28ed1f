"""Models, their versions and aliases, over a store for records and a folder for files."""

from __future__ import annotations

import difflib
import hashlib
import itertools
import re
import secrets
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from verl_workflow.artifacts import Artifact
from verl_workflow.errors import ErrorCode, FencedError, UserError, VerlWorkflowError
from verl_workflow.registry import _files, _probe
from verl_workflow.registry._records import FORMAT, VERSION, AliasRecord, Lineage, ModelVersion, damaged, dump, parse
from verl_workflow.storage import Store

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_-]{0,63}")
_MOVE = re.compile(r"([0-9]{12})\.json")


class Registry:
    """The registry below ``registry/`` of a storage.

    A version is claimed (``claims/<version>.json``), its files are put in place, then its manifest is written
    (``versions/<version>.json``): it exists from then on. An alias is the newest of its numbered records
    (``aliases/<alias>/<number>.json``). All records are put-if-absent and none is ever changed, so any number of
    writers may race and any of them may die: the next attempt finishes what was left, under the same version.

    Args:
        store: for the records. root: folder for the files, on a file system that all nodes share.
        check: called with source and copy before a copy counts; by default both are loaded and must answer alike.
    """

    def __init__(self, store: Store, root: Path, *, check: Callable[[Path, Path], None] = _probe.check_copy) -> None:
        self._store = store
        self._root = Path(root)
        self._check = check

    def models(self) -> list[str]:
        """Names of all models with a version, sorted."""
        names = filter(_NAME.fullmatch, self._store.folders("registry"))
        return [name for name in names if self._version_names(name)]

    def versions(self, model: str) -> list[ModelVersion]:
        """All versions, oldest first.

        Raises:
            UserError(MODEL_UNKNOWN): there is no such model.
            VerlWorkflowError(STORAGE): a manifest is damaged; the others are to be had one by one.
        """
        names = self.version_names(model)
        return [found for name in names if (found := self._version(model, name)) is not None]

    def version_names(self, model: str) -> list[str]:
        """Names of all versions, oldest first, whatever their manifests say. Raises UserError(MODEL_UNKNOWN)."""
        return self._version_names(self._known(model))

    def alias_names(self, model: str) -> list[str]:
        """Names of all aliases of the model, sorted, whatever their records say."""
        names = filter(_NAME.fullmatch, self._store.folders(self._key(_check_name(model, "model"), "aliases")))
        return [name for name in names if self._numbers(model, name)]

    def resolve(self, model: str, alias_or_version: str) -> ModelVersion:
        """The version of that name, or the one the alias points to.

        Raises:
            UserError(MODEL_UNKNOWN): neither exists; close names are suggested.
        """
        self._known(model)
        _check_name(alias_or_version, "alias")
        record = None if VERSION.fullmatch(alias_or_version) else self.alias(model, alias_or_version)
        found = self._version(model, record.version if record else alias_or_version)
        if found is not None:
            return found
        if record is not None:
            raise VerlWorkflowError(
                ErrorCode.STORAGE,
                f"{model}: {alias_or_version} points to {record.version}, whose manifest is gone",
                where=self._store.uri,
                remedy=f"Restore registry/{model}/versions, or roll the alias back.",
            )
        known = [*self.alias_names(model), *self._version_names(model)]
        raise _unknown(f"{model} has no alias or version of this name", alias_or_version, known, "verl-workflow models")

    def register(
        self, model: str, source: Artifact, lineage: Lineage, evaluation: Mapping[str, Any] | None = None
    ) -> ModelVersion:
        """Copy `source`, a folder in Hugging Face format, in as a new version.

        The same run, stage and content give the same version however often they are registered, also when an earlier
        attempt died half-way; damaged files of it are then put right.

        Raises:
            UserError(MODEL_INVALID): it is no whole model. No version has been made and no file is left.
            VerlWorkflowError: MODEL_INVALID, the source is not what its artifact says; STORAGE.
        """
        _check_name(model, "model")
        identity = _identity(source, lineage)
        version = self._claimed(model, identity)
        if version is None or not _files.holds(self._folder(model, version), source.sha256):
            version = self._copied_in(model, source, lineage, identity, version)
        target = self._folder(model, version)
        files = _files.records(target)
        manifest = ModelVersion(
            model=model,
            version=version,
            artifact=Artifact(path=target, sha256=source.sha256, bytes=sum(file.bytes for file in files.values())),
            files=files,
            lineage=lineage,
            evaluation=evaluation or {},
            created_at=_now(),
        )
        self._store.create(self._key(model, "versions", f"{version}.json"), dump(manifest.to_json()))
        found = self._version(model, version)
        assert found is not None, "its manifest has just been written"
        return found

    def _copied_in(self, model: str, source: Artifact, lineage: Lineage, identity: str, version: str | None) -> str:
        from verl_workflow.models import check_folder

        check_folder(source.path)
        parent = self._folder(model, "any").parent
        try:
            with _files.copied(source, parent, identity[:16], lineage.attempt, self._check) as copy:
                # Not before the copy is known to be good: a refused model uses up no number.
                version = version or self._claim(model, identity)
                _files.put(copy, self._folder(model, version), source.sha256)
        except OSError as error:
            raise VerlWorkflowError(
                ErrorCode.STORAGE,
                f"the model cannot be copied into the registry: {error}",
                where=str(parent),
                remedy="Check that the folder is writable and its disk not full.",
                retryable=True,
            ) from error
        return version

    def verify(self, model: str, version: str, *, contents: bool = True) -> None:
        """Raise VerlWorkflowError(MODEL_INVALID), naming each file, unless all files are as the manifest says.

        Args:
            contents: read the files; otherwise only their names and sizes are compared, which takes no time.
        """
        found = self.resolve(model, version)
        wrong = _files.differences(found.path, found.files, contents=contents)
        if wrong:
            raise VerlWorkflowError(
                ErrorCode.MODEL_INVALID,
                f"{model} {found.version} is damaged: {'; '.join(wrong)}",
                where=str(found.path),
                remedy="Restore the files, or roll the alias back to a version that is whole.",
            )

    def alias(self, model: str, alias: str) -> AliasRecord | None:
        """The alias' newest move, None when it has never been set."""
        numbers = self._numbers(model, alias)
        return self._move(model, alias, numbers[-1]) if numbers else None

    def aliases(self, model: str) -> dict[str, AliasRecord]:
        """The newest move of each alias of the model, by name."""
        return {name: record for name in self.alias_names(model) if (record := self.alias(model, name)) is not None}

    def history(self, model: str, alias: str) -> list[AliasRecord]:
        """All moves of the alias, oldest first."""
        return [self._move(model, alias, number) for number in self._numbers(model, alias)]

    def set_alias(
        self,
        model: str,
        alias: str,
        version: str,
        expected: int | None,
        *,
        run: str | None = None,
        stage: str | None = None,
        epoch: int = 0,
        rollback: bool = False,
    ) -> AliasRecord:
        """Point the alias to `version` if its newest move is still number `expected` (None: it was never set).

        Args:
            run, stage, epoch: who does it. rollback: marks a step back in the history.

        Raises:
            VerlWorkflowError(REGISTRY_CONFLICT): somebody else has moved it; nothing has changed.
            FencedError: a later driver of the same run has moved it.
            UserError: MODEL_UNKNOWN, or the name is no alias.
        """
        _check_name(alias, "alias")
        if VERSION.fullmatch(alias):
            raise UserError(
                ErrorCode.SPEC_INVALID,
                "an alias cannot be named like a version",
                value=alias,
                remedy="Choose a word, such as champion.",
            )
        target = self.resolve(model, version).version
        current = self.alias(model, alias)
        if current is not None and run is not None and current.run == run and current.epoch > epoch:
            raise FencedError(
                ErrorCode.FENCED,
                f"a later driver of {run} (epoch {current.epoch}, this one's is {epoch}) has moved {model}'s {alias}",
                where=self._store.uri,
                remedy="Nothing is to be done: the later driver goes on.",
            )
        if (current.number if current else None) != expected:
            raise self._conflict(model, alias, expected, current)
        record = AliasRecord(
            number=(expected or 0) + 1,
            model=model,
            alias=alias,
            version=target,
            rollback=rollback,
            run=run,
            stage=stage,
            epoch=epoch,
            token=secrets.token_hex(8),
            at=_now(),
        )
        if not self._store.create(self._move_key(model, alias, record.number), dump(record.to_json())):
            # A store may repeat a write whose answer it lost, and then find its own record there.
            winner = self._move(model, alias, record.number)
            if winner != record:
                raise self._conflict(model, alias, expected, winner)
        return record

    def rollback(self, model: str, alias: str, to: str | None = None) -> AliasRecord:
        """Point the alias back: to version `to`, or to the one it pointed to before the present one.

        Rolling back twice goes two versions back, not forth again. The files of the version are verified first.

        Raises:
            UserError(MODEL_UNKNOWN): no such model, alias or version, or nothing to go back to.
            VerlWorkflowError: REGISTRY_CONFLICT or MODEL_INVALID; nothing has changed.
        """
        self._known(model)
        history = self.history(model, alias)
        if not history:
            raise _unknown(
                f"{model} has no alias of this name", alias, sorted(self.aliases(model)), "verl-workflow models"
            )
        wanted = to if to is not None else _before(history)
        if wanted is None:
            raise UserError(
                ErrorCode.MODEL_UNKNOWN,
                f"{model}'s {alias} has no version before {history[-1].version} to go back to",
                where=self._store.uri,
                remedy="Name the version to point it to.",
            )
        target = self.resolve(model, wanted).version
        self.verify(model, target)
        return self.set_alias(model, alias, target, history[-1].number, rollback=True)

    def _known(self, model: str) -> str:
        _check_name(model, "model")
        if not self._version_names(model):
            raise _unknown("there is no such model in the registry", model, self.models(), self._store.uri)
        return model

    def _version_names(self, model: str) -> list[str]:
        keys = self._store.list(self._key(model, "versions"))
        stems = [name.removesuffix(".json") for key in keys if (name := key.rsplit("/", 1)[-1]).endswith(".json")]
        return sorted((stem for stem in stems if VERSION.fullmatch(stem)), key=_number)

    def _version(self, model: str, version: str) -> ModelVersion | None:
        key = self._key(model, "versions", f"{version}.json")
        data = self._store.get(key)
        if data is None:
            return None
        found = ModelVersion.from_json(parse(data, key), self._folder(model, version), key)
        if (found.model, found.version) != (model, version):
            raise damaged(key, f"the registry's record is that of {found.model} {found.version}")
        return found

    def _claimed(self, model: str, identity: str) -> str | None:
        """The version claimed for this identity earlier, if one was."""
        for key in self._store.list(self._key(model, "claims")):
            version = key.rsplit("/", 1)[-1].removesuffix(".json")
            if VERSION.fullmatch(version) and self._claims(key, identity):
                return version
        return None

    def _claim(self, model: str, identity: str) -> str:
        # From the first number on: whoever skips a claim it has not looked at may skip its own identity's.
        data = dump({"format": FORMAT, "identity": identity})
        present = set(self._store.list(self._key(model, "claims")))
        for number in itertools.count(1):
            version = f"v{number:04d}"
            key = self._key(model, "claims", f"{version}.json")
            if key not in present and self._store.create(key, data):
                return version
            # Found there: another identity's, another attempt's at this one, or a repeated write.
            if self._claims(key, identity):
                return version
        raise AssertionError("numbers do not end")

    def _claims(self, key: str, identity: str) -> bool:
        return bool(parse(self._store.get(key) or b"", key).get("identity") == identity)

    def _numbers(self, model: str, alias: str) -> list[int]:
        prefix = self._key(_check_name(model, "model"), "aliases", _check_name(alias, "alias"))
        names = [key.rsplit("/", 1)[-1] for key in self._store.list(prefix)]
        return sorted(int(match[1]) for match in map(_MOVE.fullmatch, names) if match)

    def _move(self, model: str, alias: str, number: int) -> AliasRecord:
        key = self._move_key(model, alias, number)
        found = AliasRecord.from_json(parse(self._store.get(key) or b"", key), key)
        if (found.model, found.alias, found.number) != (model, alias, number):
            raise damaged(key, f"the registry's record is that of move {found.number} of {found.model}'s {found.alias}")
        return found

    def _move_key(self, model: str, alias: str, number: int) -> str:
        return self._key(model, "aliases", alias, f"{number:012d}.json")

    def _key(self, model: str, *parts: str) -> str:
        return "/".join(("registry", model, *parts))

    def _folder(self, model: str, version: str) -> Path:
        return (self._root / "registry" / model / version).absolute()

    def _conflict(self, model: str, alias: str, expected: int | None, found: AliasRecord | None) -> VerlWorkflowError:
        now = "is not set" if found is None else f"points to {found.version} (move {found.number}, {found.at})"
        return VerlWorkflowError(
            ErrorCode.REGISTRY_CONFLICT,
            f"{model}'s {alias} was moved meanwhile: it {now}, and move {expected or 0} was the newest before",
            where=self._store.uri,
            remedy="Evaluate against the present one, and try again.",
        )


def _identity(source: Artifact, lineage: Lineage) -> str:
    return hashlib.sha256("\0".join((lineage.run, lineage.stage, source.sha256)).encode()).hexdigest()


def _before(history: Sequence[AliasRecord]) -> str | None:
    """What was in force before the present version: a step back undoes the moves after its target."""
    path: list[str] = []
    for move in history:
        if move.rollback and move.version in path:
            while path[-1] != move.version:
                path.pop()
        elif not path or path[-1] != move.version:
            path.append(move.version)
    return path[-2] if len(path) > 1 else None


def _number(version: str) -> int:
    return int(version[1:])


def _check_name(name: str, what: str) -> str:
    if not _NAME.fullmatch(name):
        raise UserError(
            ErrorCode.MODEL_UNKNOWN,
            f"this cannot be the name of a {what}" if what == "model" else f"this cannot be the name of an {what}",
            value=name,
            remedy="Names have up to 64 letters, digits, '_' and '-', and begin with a letter or '_'.",
        )
    return name


def _unknown(what: str, value: str, known: Sequence[str], where: str) -> UserError:
    close = difflib.get_close_matches(value, known, n=1)
    hint = f"Did you mean {close[0]}? " if close else ""
    listed = ", ".join(known) or "none"
    return UserError(ErrorCode.MODEL_UNKNOWN, what, where=where, value=value, remedy=f"{hint}There are: {listed}.")


def _now() -> str:
    return datetime.now(timezone.utc).isoformat(timespec="seconds")
