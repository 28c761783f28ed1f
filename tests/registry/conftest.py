"""Stores on local disk and on S3, small whole models, and the context of an attempt."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from _registries import unchecked

from verl_workflow.artifacts import Artifact
from verl_workflow.registry import Lineage, Registry
from verl_workflow.storage import Store


@pytest.fixture(params=["local", "s3"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Store:
    return Store(str(tmp_path / "storage") if request.param == "local" else request.getfixturevalue("s3_uri"))


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The built-in model; not to be changed."""
    from verl_workflow.models._tiny import write_tiny

    folder = tmp_path_factory.mktemp("tiny")
    write_tiny(folder)
    return folder


@pytest.fixture
def model(tiny: Path, tmp_path: Path) -> Callable[[str], Artifact]:
    """Makes models that load and differ by one byte of a file beside the weights."""

    def make(name: str) -> Artifact:
        folder = tmp_path / "models" / name
        shutil.copytree(tiny, folder)
        (folder / "README.md").write_text(name)
        return Artifact.of(folder)

    return make


@pytest.fixture
def lineage() -> Callable[..., Lineage]:
    def make(run: str = "monday", **fields: Any) -> Lineage:
        return Lineage(**{"run": run, "stage": "promote", "epoch": 1, **fields})

    return make


@pytest.fixture
def registry(store: Store, tmp_path: Path) -> Registry:
    return unchecked(store, tmp_path / "files")
