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
