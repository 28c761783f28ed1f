from __future__ import annotations

from pathlib import Path

import pytest
from _runs import Invoke, Runs
from typer.testing import CliRunner

from verl_workflow.cli import app


@pytest.fixture
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Runs:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("VERL_WORKFLOW_STORAGE", str(tmp_path / "storage"))
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    return Runs(tmp_path)


@pytest.fixture
def invoke() -> Invoke:
    """The command line in this process, on a pipe."""
    return lambda *arguments: CliRunner().invoke(app, list(arguments))
