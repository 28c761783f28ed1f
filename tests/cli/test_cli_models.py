from __future__ import annotations

import json
from pathlib import Path

import pytest
from _runs import Invoke, Runs

from verl_workflow.artifacts import Artifact
from verl_workflow.registry import Lineage, Registry


@pytest.fixture
def registry(runs: Runs) -> Registry:
    return Registry(runs.store, runs.path, check=lambda source, copy: None)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small whole model in Hugging Face format."""
    from verl_workflow.models._tiny import write_tiny

    folder = tmp_path_factory.mktemp("model")
    write_tiny(folder)
    return folder


def register(registry: Registry, model: Path, run: str, score: float) -> str:
    lineage = Lineage(run=run, stage="promote", pipeline="demo", data={"train": "ab" * 32}, versions={"verl": "0.9.1"})
    evaluation = {"candidate": {"score": score, "rows": 20}, "champion": None, "rows": 20}
    return registry.register("demo", Artifact.of(model), lineage, evaluation).version


def test_models_show_versions_aliases_history_and_lineage(
    runs: Runs, registry: Registry, invoke: Invoke, model: Path
) -> None:
    one, two = register(registry, model, "monday", 0.5), register(registry, model, "tuesday", 0.75)
    registry.set_alias("demo", "champion", one, None, run="monday", stage="promote")
    registry.set_alias("demo", "champion", two, 1, run="tuesday", stage="promote")
    registry.set_alias("demo", "champion", one, 2, rollback=True)

    shown = invoke("models")
    assert shown.exit_code == 0, shown.output
    assert [line.split() for line in shown.stdout.splitlines()] == [
        ["model", "versions", "newest", "aliases"],
        ["demo", "2", two, "champion", "->", one],
    ]

    shown = invoke("models", "demo")
    lines = [line.split() for line in shown.stdout.splitlines()]
    assert lines[1][:4] == [one, "champion", "0.500", "monday"]
    assert lines[1][-1] == str(registry.resolve("demo", one).path)
    assert lines[2][:4] == [two, "-", "0.750", "tuesday"]
    moves = [line.partition(" -> ")[2] for line in shown.stdout.splitlines() if " -> " in line]
    assert moves == [f"{one}  by hand (rolled back)", f"{two}  run tuesday", f"{one}  run monday"]
    assert f"{one} comes from" in shown.stdout
    assert "  run: monday, stage promote of pipeline demo" in shown.stdout
    assert "  data: train abababababab" in shown.stdout


def test_models_as_json(runs: Runs, registry: Registry, invoke: Invoke, model: Path) -> None:
    version = register(registry, model, "monday", 0.5)
    registry.set_alias("demo", "champion", version, None, run="monday")
    listed = json.loads(invoke("models", "--json").stdout)
    assert listed["models"] == [{"model": "demo", "versions": [version], "aliases": {"champion": version}}]
    found = json.loads(invoke("models", "demo", "--json").stdout)
    assert found["versions"][0]["lineage"]["run"] == "monday"
    assert found["aliases"]["champion"]["version"] == version
    assert [move["run"] for move in found["aliases"]["champion"]["history"]] == ["monday"]


def test_an_unknown_model_is_a_user_error_and_an_empty_registry_is_not(
    runs: Runs, registry: Registry, invoke: Invoke, model: Path
) -> None:
    shown = invoke("models", "--json")
    assert (shown.exit_code, json.loads(shown.stdout)["models"]) == (0, [])
    assert not runs.path.exists()
    register(registry, model, "monday", 0.5)
    shown = invoke("models", "dmeo")
    assert shown.exit_code == 2
    assert "Did you mean demo?" in shown.stderr


def test_a_damaged_record_is_named_and_the_rest_is_shown(
    runs: Runs, registry: Registry, invoke: Invoke, model: Path
) -> None:
    one, two = register(registry, model, "monday", 0.5), register(registry, model, "tuesday", 0.75)
    registry.set_alias("demo", "champion", one, None)
    registry.set_alias("demo", "challenger", two, None)
    runs.store.put(f"registry/demo/versions/{two}.json", b'{"format": 1}')
    runs.store.put("registry/demo/aliases/challenger/000000000001.json", b'{"format": 1}')
    # What others put beside the records is none of them.
    runs.store.put("registry/demo/aliases/champion/²", b"x")
    runs.store.put("registry/a b/versions/v0001.json", b"x")

    shown = invoke("models", "--json")
    assert shown.exit_code == 1
    listed = json.loads(shown.stdout)
    assert listed["models"] == [{"model": "demo", "versions": [one, two], "aliases": {"champion": one}}]
    assert [(problem["version"], problem["alias"]) for problem in listed["problems"]] == [
        (two, None),
        (None, "challenger"),
    ]
    shown = invoke("models")
    assert shown.exit_code == 1
    assert f"champion -> {one}" in shown.stdout
    assert f"registry/demo/versions/{two}.json" in shown.stderr

    shown = invoke("models", "demo", "--json")
    assert shown.exit_code == 1
    found = json.loads(shown.stdout)
    assert [version["version"] for version in found["versions"]] == [one]
    assert list(found["aliases"]) == ["champion"]
    assert "registry/demo/aliases/challenger/000000000001.json" in found["problems"][1]["error"]["message"]


def test_files_that_are_missing_or_of_another_size_are_told(
    runs: Runs, registry: Registry, invoke: Invoke, model: Path
) -> None:
    one, two = register(registry, model, "monday", 0.5), register(registry, model, "tuesday", 0.75)
    assert invoke("models", "demo").exit_code == 0
    (registry.resolve("demo", two).path / "config.json").unlink()
    shown = invoke("models", "demo", "--json")
    assert shown.exit_code == 1
    found = json.loads(shown.stdout)
    assert [version["version"] for version in found["versions"]] == [one, two]
    (problem,) = found["problems"]
    assert (problem["version"], problem["error"]["code"]) == (two, "model_invalid")
    assert f"error: {registry.resolve('demo', two).path}: demo {two} is damaged: config.json is missing" in shown.stderr


def test_contents_are_compared_when_asked_for(runs: Runs, registry: Registry, invoke: Invoke, model: Path) -> None:
    version = register(registry, model, "monday", 0.5)
    shown = invoke("models", "demo", "--verify")
    assert shown.exit_code == 0
    assert "all files of 1 version are what was registered" in shown.stderr
    path = registry.resolve("demo", version).path / "config.json"
    path.write_bytes(path.read_bytes()[::-1])
    assert invoke("models", "demo").exit_code == 0
    shown = invoke("models", "demo", "--verify")
    assert shown.exit_code == 1
    assert "config.json has changed" in shown.stderr
    assert invoke("models", "--verify").exit_code == 2


def test_files_that_cannot_be_seen_from_here_are_not_said_to_be_missing(
    runs: Runs, registry: Registry, invoke: Invoke, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    register(registry, model, "monday", 0.5)
    monkeypatch.setattr("verl_workflow.cli._models._files_root", lambda store: runs.folder / "elsewhere")
    shown = invoke("models", "demo")
    assert shown.exit_code == 0
    assert "are not checked" in shown.stderr
    assert invoke("models", "demo", "--verify").exit_code == 2
