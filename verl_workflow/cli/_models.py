"""`models`: what is in the registry, what each alias points to and pointed to, and where a version comes from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from verl_workflow.cli import _options
from verl_workflow.cli._output import note, print_json, print_line, print_table, reported
from verl_workflow.cli._words import figure

if TYPE_CHECKING:
    from verl_workflow.registry import AliasRecord, ModelVersion, Registry
    from verl_workflow.storage import Store


def models(
    name: Annotated[str | None, typer.Argument(metavar="[NAME]", help="One model.", show_default=False)] = None,
    storage: _options.Storage = None,
    as_json: _options.Json = False,
) -> None:
    """List the models in the registry; with NAME its versions, where its aliases point and pointed, and its lineage."""
    with reported(as_json):
        from verl_workflow.registry import Registry
        from verl_workflow.storage import Store

        store = Store(_options.storage_of(storage))
        registry = Registry(store, _files_root(store))
        if name is None:
            _show_all(registry, store, as_json)
        else:
            _show_one(registry, name, as_json)


def _files_root(store: Store) -> Path:
    """The folder of the registry's files: the storage itself, or the one that its runs name beside an object store."""
    if store.local_path is not None:
        return store.local_path
    from verl_workflow.workflow import list_runs

    named = [state.definition["artifacts"] for state in list_runs(store) if "artifacts" in state.definition]
    return Path(named[-1]) if named else Path()


def _show_all(registry: Registry, store: Store, as_json: bool) -> None:
    found: list[dict[str, Any]] = [
        {
            "model": name,
            "versions": [version.version for version in registry.versions(name)],
            "aliases": {alias: record.version for alias, record in registry.aliases(name).items()},
        }
        for name in registry.models()
    ]
    if as_json:
        print_json({"storage": store.uri, "models": found})
        return
    if not found:
        note(f"no models in {store.uri}")
        return
    from rich.table import Table

    rows = Table("model", "versions", "newest", "aliases", box=None, pad_edge=False)
    for model in found:
        versions = model["versions"]
        pointing = ", ".join(f"{alias} -> {version}" for alias, version in model["aliases"].items())
        rows.add_row(model["model"], str(len(versions)), versions[-1] if versions else "-", pointing or "-")
    print_table(rows)


def _show_one(registry: Registry, name: str, as_json: bool) -> None:
    versions = registry.versions(name)
    histories = {alias: registry.history(name, alias) for alias in registry.aliases(name)}
    if as_json:
        print_json(
            {
                "model": name,
                "versions": [{**version.to_json(), "path": str(version.path)} for version in versions],
                "aliases": {
                    alias: {"version": moves[-1].version, "history": [move.to_json() for move in moves]}
                    for alias, moves in histories.items()
                },
            }
        )
        return
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
        "champion then": lineage.champion,
        "data": ", ".join(f"{name} {_digest(digest)}" for name, digest in lineage.data.items()),
        "config": _digest(lineage.config),
        "code": _digest(lineage.code),
        "tools": ", ".join(f"{tool} {number}" for tool, number in lineage.versions.items()),
    }
    return [f"{version.version} comes from"] + [f"  {what}: {fact}" for what, fact in facts.items() if fact]


def _digest(sha256: str | None) -> str | None:
    return None if sha256 is None else sha256[:12]
