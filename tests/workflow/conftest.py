from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from verl_workflow.storage import Store

# A loaded machine takes longer to start Serve's proxy than it waits by default, and another one is started then.
os.environ.setdefault("RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S", "120")


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(str(tmp_path / "storage"))


@pytest.fixture
def marks(tmp_path: Path) -> Path:
    folder = tmp_path / "marks"
    folder.mkdir()
    return folder


@pytest.fixture(scope="module")
def ray_cluster() -> Iterator[Any]:
    """A local Ray of this process. Its sockets need a short path."""
    import ray

    folder = tempfile.mkdtemp(prefix="vw-", dir="/tmp")
    path = os.pathsep.join([str(Path(__file__).parent), *filter(None, [os.environ.get("PYTHONPATH")])])
    with pytest.MonkeyPatch.context() as environment:
        # Of the cluster, not of this job: it has no runtime_env.
        environment.setenv("PYTHONPATH", path)
        ray.init(address="local", num_cpus=4, include_dashboard=False, log_to_driver=False, _temp_dir=folder)
    try:
        yield ray
    finally:
        ray.shutdown()
        shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="module")
def _flows_folder(ray_cluster: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("flows") / "storage"


@pytest.fixture
def flows(_flows_folder: Path) -> Iterator[Path]:
    """The module's storage of workflows, empty. Its host is shared, for it takes seconds to start."""
    from _flows import end_hosts, hosts

    from verl_workflow import workflow

    workflow.init(storage=str(_flows_folder))
    yield _flows_folder
    workflow.init(storage=str(_flows_folder))
    for name, _ in [*workflow.list_all({"RUNNING", "PENDING"})]:
        workflow.cancel(name)
    shutil.rmtree(_flows_folder / "runs", ignore_errors=True)
    if len(hosts()) > 1:
        end_hosts()
