"""A Ray cluster, and the context of an attempt."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture(scope="module")
def ray_cluster() -> Iterator[None]:
    """One node with 8 CPUs and one logical GPU."""
    import ray

    folder = tempfile.mkdtemp(prefix="vw", dir="/tmp")
    ray.init(
        address="local",
        num_cpus=8,
        num_gpus=1,
        include_dashboard=False,
        log_to_driver=False,
        _temp_dir=folder,
    )
    yield
    ray.shutdown()
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture
def context(tmp_path: Path) -> Callable[..., Any]:
    """Makes the context of an attempt; its reports are in ``reports``."""

    from verl_workflow.pipeline._context import StageContext

    def make(attempt: int = 1, reports: list[Any] | None = None, **changes: Any) -> Any:
        code = tmp_path / "code"
        code.mkdir(exist_ok=True)
        return StageContext(
            **{
                "run_id": "run",
                "stage": "train",
                "attempt": attempt,
                "epoch": 1,
                "storage": str(tmp_path / "storage"),
                "records": "runs/run/0123456789abcdef",
                "root": tmp_path / "storage",
                "code_dir": code,
                "report": reports.append if reports is not None else lambda _: None,
                **changes,
            }
        )

    return make
