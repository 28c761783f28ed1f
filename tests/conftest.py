"""Shared by all tests: Ray without token authentication or anyone else's cluster, and an S3 server."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

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
    from moto.moto_server.werkzeug_app import DomainDispatcherApplication, MotoRequestHandler, create_backend_app
    from werkzeug.serving import make_server

    # Each request would be a line of every failure's output.
    logging.getLogger("werkzeug").setLevel(logging.WARNING)
    app, one_at_a_time = DomainDispatcherApplication(create_backend_app), threading.Lock()

    def answer(environ: Any, start_response: Any) -> Any:
        # moto looks whether a key exists and then writes it; S3 does both at once.
        with one_at_a_time:
            return app(environ, start_response)

    server = make_server("127.0.0.1", 0, answer, threaded=True, request_handler=MotoRequestHandler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()


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
