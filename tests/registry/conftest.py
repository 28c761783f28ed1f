"""Stores on local disk and on S3, small whole models, and the context of an attempt."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from _registries import unchecked

from verl_workflow.artifacts import Artifact
from verl_workflow.registry import Lineage, Registry
from verl_workflow.storage import Store


@pytest.fixture(scope="session")
def s3_server() -> Iterator[str]:
    import boto3
    from moto.server import ThreadedMotoServer

    # Each request would be a line of every failure's output.
    logging.getLogger("werkzeug").setLevel(logging.WARNING)
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0)
    server.start()
    host, port = server.get_host_and_port()
    endpoint = f"http://{host}:{port}"
    keys = {"aws_access_key_id": "test", "aws_secret_access_key": "test", "region_name": "us-east-1"}
    boto3.client("s3", endpoint_url=endpoint, **keys).create_bucket(Bucket="models")
    yield endpoint
    server.stop()


@pytest.fixture(params=["local", "s3"])
def store(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Store:
    if request.param == "local":
        return Store(str(tmp_path / "storage"))
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "test")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "test")
    monkeypatch.setenv("AWS_REGION", "us-east-1")
    monkeypatch.setenv("AWS_ENDPOINT_URL", request.getfixturevalue("s3_server"))
    return Store(f"s3://models/{tmp_path.name}")


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
