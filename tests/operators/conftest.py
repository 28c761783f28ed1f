from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

# Before Airflow is imported: it makes its folder then.
os.environ.setdefault("AIRFLOW_HOME", tempfile.mkdtemp(prefix="verl-airflow-"))
os.environ["AIRFLOW__CORE__LOAD_EXAMPLES"] = "False"

import pytest
from _ray_standin import Connect, RayStandin, ray_standin
from verl_airflow import _clients


@pytest.fixture
def ray() -> Iterator[RayStandin]:
    with ray_standin() as found:
        yield found


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Looks and pauses that a test can wait for."""
    monkeypatch.setattr(_clients, "_STOP_LOOK_S", 0.02)
    monkeypatch.setattr(_clients, "_FIRST_PAUSE_S", 0.01)


@pytest.fixture
def connect(ray: RayStandin, monkeypatch: pytest.MonkeyPatch) -> Connect:
    """Write a connection to the stand-in, and return its id."""

    def write(*, password: str = "", host: str = "", **extra: object) -> str:
        parts = {"conn_type": "verl_workflow", "host": host or ray.url, "password": password, "extra": extra}
        monkeypatch.setenv("AIRFLOW_CONN_RAY", json.dumps(parts))
        return "ray"

    return write


@pytest.fixture
def storage(tmp_path: Path) -> str:
    return (tmp_path / "storage").as_uri()
