"""Shared by all tests: Ray without token authentication or anyone else's cluster, and an S3 server."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

os.environ["RAY_AUTH_MODE"] = "disabled"
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ.pop("RAY_ADDRESS", None)
# A loaded machine takes longer to start a cluster than Ray waits by default.
os.environ.setdefault("RAY_raylet_start_wait_time_s", "120")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The longest file first, so that the others run beside it."""
    items.sort(key=lambda item: item.get_closest_marker("e2e") is None)


@pytest.fixture(scope="session")
def s3_endpoint() -> Iterator[str]:
    """moto's S3 server on loopback."""
    from moto.server import ThreadedMotoServer

    # Each request would be a line of every failure's output.
    logging.getLogger("werkzeug").setLevel(logging.WARNING)
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0)
    server.start()
    host, port = server.get_host_and_port()
    yield f"http://{host}:{port}"
    server.stop()


@pytest.fixture
def s3_uri(s3_endpoint: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A place of the test's own in a bucket; credentials and endpoint are in the environment."""
    import boto3

    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "test")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "test")
    monkeypatch.setenv("AWS_REGION", "us-east-1")
    monkeypatch.setenv("AWS_ENDPOINT_URL", s3_endpoint)
    boto3.client("s3", region_name="us-east-1", endpoint_url=s3_endpoint).create_bucket(Bucket="bucket")
    return f"s3://bucket/{tmp_path.name}"
