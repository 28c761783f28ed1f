from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import airflow
import jsonschema
import pytest
from airflow.providers_manager import ProvidersManager
from airflow.sdk._shared.module_loading import import_string
from verl_airflow.provider import get_provider_info


def airflow_says(*words: str) -> str:
    command = [sys.executable, "-m", "airflow", *words]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ, timeout=180)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


def test_it_is_what_airflow_s_schema_asks_for() -> None:
    schema = json.loads((Path(airflow.__file__).parent / "provider_info.schema.json").read_text())
    jsonschema.validate(get_provider_info(), schema)


def test_airflow_finds_it_by_its_entry_point() -> None:
    found = [each for each in entry_points(group="apache_airflow_provider") if each.module == "verl_airflow.provider"]
    assert [each.load() for each in found] == [get_provider_info]


def test_all_that_it_names_can_be_imported() -> None:
    info: dict[str, Any] = get_provider_info()
    for kind in ("operators", "sensors", "hooks", "triggers"):
        for module in info[kind][0]["python-modules"]:
            __import__(module)
    classes = [*info["extra-links"], *(each["hook-class-name"] for each in info["connection-types"])]
    assert all(isinstance(import_string(path), type) for path in classes)
    assert all(callable(import_string(each["class-name"])) for each in info["task-decorators"])


@pytest.mark.airflow
def test_airflow_s_command_shows_it() -> None:
    shown = airflow_says("providers", "get", "verl-workflow", "--full", "--output", "json")
    assert "verl_airflow.hook.RayJobsHook" in shown
    assert "verl_airflow.operators" in shown
    assert "verl_workflow" in airflow_says("providers", "hooks", "--output", "json")
    assert "RayDashboardLink" in airflow_says("providers", "links", "--output", "json")


@pytest.mark.airflow
def test_the_connection_s_form_has_its_fields() -> None:
    manager = ProvidersManager()
    assert manager.hooks["verl_workflow"] is not None
    fields = {name.rpartition("__")[2] for name in manager.connection_form_widgets if "verl_workflow" in name}
    assert fields == {"verify_tls", "ca_file", "storage", "dashboard_url"}
    behaviour = manager.field_behaviours["verl_workflow"]
    assert behaviour["relabeling"] == {"host": "Ray address", "password": "Ray token"}
    assert {"schema", "login", "port"} <= set(behaviour["hidden_fields"])
