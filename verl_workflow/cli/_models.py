"""`models`: what is in the registry, what each alias points to and pointed to, and where a version comes from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from verl_workflow.cli import _options
from verl_workflow.cli._output import ExitCode, note, print_json, print_line, print_table, reported
from verl_workflow.cli._words import figure
from verl_workflow.errors import ErrorCode, UserError, VerlWorkflowError

if TYPE_CHECKING:
    from verl_workflow.registry import AliasRecord, ModelVersion, Registry
    from verl_workflow.storage import Store


def models(
    name: Annotated[str | None, typer.Argument(metavar="[NAME]", help="One model.", show_default=False)] = None,
    storage: _options.Storage = None,
    verify: Annotated[
        bool,
        typer.Option("--verify", help="With NAME: read all files and compare their contents, not their sizes only."),
    ] = False,
    as_json: _options.Json = False,
) -> None:
    """List the models in the registry; with NAME its versions, where its aliases point and pointed, and its lineage.

    Exit code 1 when a record or, with NAME, a file of the registry is damaged; the rest is shown all the same.
    """
    with reported(as_json):
        from verl_workflow.registry import Registry
        from verl_workflow.storage import Store

        if verify and name is None:
            raise UserError(
                ErrorCode.PARAM_INVALID,
                "no model is named whose files are to be read",
                where="--verify",
                remedy="Name one: verl-workflow models NAME --verify.",
            )
        store = Store(_options.storage_of(storage))
        root = _files_root(store)
        registry = Registry(store, root or Path())
        if name is None:
            found = _show_all(registry, store, as_json)
        else:
            found = _show_one(registry, name, as_json, verify=verify, seen=_seen(root, needed=verify))
        for problem in found:
            note(f"error: {problem.error}")
        if found:
            raise typer.Exit(ExitCode.FAILED)


@dataclass(frozen=True, kw_only=True)
class _Problem:
    """What is damaged: a version or an alias of a model."""

    model: str
    error: VerlWorkflowError
    version: str | None = None
    alias: str | None = None

    def to_json(self) -> dict[str, Any]:
        return {"model": self.model, "version": self.version, "alias": self.alias, "error": self.error.to_json()}


def _files_root(store: Store) -> Path | None:
    """The folder of the registry's files: the storage itself, or the one that its runs name beside an object store."""
    if store.local_path is not None:
        return store.local_path
    from verl_workflow.workflow import list_runs

    named = [state.definition.get("artifacts") for state in list_runs(store)]
    return next((Path(folder) for folder in reversed(named) if isinstance(folder, str)), None)


def _seen(root: Path | None, *, needed: bool) -> bool:
    """Whether the registry's files can be looked at from this machine."""
    if root is not None and root.is_dir():
        return True
    place = "no run names their folder" if root is None else f"{root} is not there"
    if needed:
        raise UserError(
            ErrorCode.FILE_MISSING,
            f"the registry's files cannot be read on this machine: {place}",
            where="--verify",
            remedy="Verify on a machine that shares the file system of the runs.",
        )
    note(f"warning: the registry's files are not checked: {place}")
    return False


def _versions(registry: Registry, model: str) -> tuple[list[ModelVersion], list[_Problem]]:
    """The versions whose manifests can be read, and what is wrong with the others."""
    found, problems = [], []
    for version in registry.version_names(model):
        try:
            found.append(registry.resolve(model, version))
        except VerlWorkflowError as error:
            problems.append(_Problem(model=model, version=version, error=error))
    return found, problems


def _histories(registry: Registry, model: str) -> tuple[dict[str, list[AliasRecord]], list[_Problem]]:
    """The moves of the aliases whose records can be read, and what is wrong with the others."""
    found, problems = {}, []
    for alias in registry.alias_names(model):
        try:
            found[alias] = registry.history(model, alias)
        except VerlWorkflowError as error:
            problems.append(_Problem(model=model, alias=alias, error=error))
    return found, problems


def _show_all(registry: Registry, store: Store, as_json: bool) -> list[_Problem]:
    found: list[dict[str, Any]] = []
    problems: list[_Problem] = []
    for name in registry.models():
        _, damaged = _versions(registry, name)
        histories, lost = _histories(registry, name)
        problems += damaged + lost
        found.append(
            {
                "model": name,
                "versions": registry.version_names(name),
                "aliases": {alias: moves[-1].version for alias, moves in histories.items()},
            }
        )
    if as_json:
        print_json({"storage": store.uri, "models": found, "problems": [problem.to_json() for problem in problems]})
        return problems
    if not found:
        note(f"no models in {store.uri}")
        return problems
    from rich.table import Table

    rows = Table("model", "versions", "newest", "aliases", box=None, pad_edge=False)
    for model in found:
        versions = model["versions"]
        pointing = ", ".join(f"{alias} -> {version}" for alias, version in model["aliases"].items())
        rows.add_row(model["model"], str(len(versions)), versions[-1], pointing or "-")
    print_table(rows)
    return problems


def _show_one(registry: Registry, name: str, as_json: bool, *, verify: bool, seen: bool) -> list[_Problem]:
    versions, problems = _versions(registry, name)
    histories, lost = _histories(registry, name)
    problems += lost
    for version in versions if seen else ():
        try:
            registry.verify(name, version.version, contents=verify)
        except VerlWorkflowError as error:
            problems.append(_Problem(model=name, version=version.version, error=error))
    if as_json:
        print_json(
            {
                "model": name,
                "versions": [{**version.to_json(), "path": str(version.path)} for version in versions],
                "aliases": {
                    alias: {"version": moves[-1].version, "history": [move.to_json() for move in moves]}
                    for alias, moves in histories.items()
                },
                "problems": [problem.to_json() for problem in problems],
            }
        )
        return problems
    if verify and not problems:
        note(f"all files of {len(versions)} version{'s' * (len(versions) != 1)} are what was registered")
    _show_versions(versions, histories)
    for alias, moves in histories.items():
        print_line("")
        print_line(f"{alias}:")
        for move in reversed(moves):
            who = f"run {move.run}" if move.run else "by hand"
            print_line(f"  {move.at}  -> {move.version}  {who}{' (rolled back)' if move.rollback else ''}")
    shown = {moves[-1].version for moves in histories.values()} or {version.version for version in versions[-1:]}
    for version in versions:
        if version.version in shown:
            print_line("")
            for line in _lineage(version):
                print_line(line)
    return problems


def _show_versions(versions: Sequence[ModelVersion], histories: Mapping[str, Sequence[AliasRecord]]) -> None:
    from rich.table import Table

    rows = Table("version", "aliases", "score", "run", "created", "path", box=None, pad_edge=False)
    for version in versions:
        pointing = [alias for alias, moves in histories.items() if moves[-1].version == version.version]
        rows.add_row(
            version.version,
            ", ".join(pointing) or "-",
            figure(_score(version.evaluation)),
            version.lineage.run,
            version.created_at,
            str(version.path),
        )
    print_table(rows)


def _score(evaluation: Mapping[str, Any]) -> Any:
    candidate = evaluation.get("candidate")
    return candidate.get("score") if isinstance(candidate, Mapping) else None


def _lineage(version: ModelVersion) -> list[str]:
    """Where a version comes from; digests by their first twelve digits, in full with ``--json``."""
    lineage = version.lineage
    pipeline = f" of pipeline {lineage.pipeline}" if lineage.pipeline else ""
    facts = {
        "run": f"{lineage.run}, stage {lineage.stage}{pipeline}",
        "files": f"{len(version.files)}, {version.artifact.bytes} bytes, sha256 {version.artifact.sha256[:12]}",
        "trained from": _digest(lineage.parent),
        "gone on from": lineage.extends,
        "champion then": lineage.champion,
        "data": ", ".join(f"{name} {_digest(digest)}" for name, digest in lineage.data.items()),
        "config": _digest(lineage.config),
        "code": _digest(lineage.code),
        "tools": ", ".join(f"{tool} {number}" for tool, number in lineage.versions.items()),
    }
    return [f"{version.version} comes from"] + [f"  {what}: {fact}" for what, fact in facts.items() if fact]


def _digest(sha256: str | None) -> str | None:
    return None if sha256 is None else sha256[:12]
