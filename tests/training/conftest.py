"""A Ray cluster, and the context of an attempt."""

from __future__ import annotations

import json
import shutil
import sys
import tempfile
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from _training_pieces import stage


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
def context(tmp_path: Path) -> Iterator[Callable[..., Any]]:
    """Makes the context of an attempt; its reports are in ``reports``. Each test has a run of its own."""

    from verl_workflow.pipeline._context import StageContext

    records = f"runs/run/{uuid.uuid4().hex[:16]}"
    made: list[StageContext] = []

    def make(attempt: int = 1, reports: list[Any] | None = None, **changes: Any) -> Any:
        code = tmp_path / "code"
        code.mkdir(exist_ok=True)
        found = StageContext(
            **{
                "run_id": "run",
                "stage": "train",
                "attempt": attempt,
                "epoch": 1,
                "storage": str(tmp_path / "storage"),
                "records": records,
                "root": tmp_path / "storage",
                "code_dir": code,
                "report": reports.append if reports is not None else lambda _: None,
                **changes,
            }
        )
        made.append(found)
        return found

    yield make
    _give_back(made)


def _give_back(made: list[Any]) -> None:
    """GPUs that are held for an attempt that does not come."""
    from verl_workflow.training._names import StageName
    from verl_workflow.training._places import Places

    ray = sys.modules.get("ray")
    if ray is not None and ray.is_initialized():
        for stage in {StageName.of(each) for each in made}:
            Places(stage, "99.99", 1.0).release()


@pytest.fixture
def run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, context: Callable[..., Any]
) -> Callable[..., tuple[dict[str, Any], list[Any]]]:
    """Runs an attempt whose process follows a plan; returns outputs and reports."""
    import pyarrow as pa
    from pyarrow import parquet

    from verl_workflow.training import _stage, run_verl_stage

    monkeypatch.setattr(_stage, "_ENTRY", "_standin")
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent))
    monkeypatch.setenv("STANDIN_PLAN", str(tmp_path / "plan.json"))
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text(json.dumps({"hidden_size": 64}))
    for name in ("train", "validation"):
        parquet.write_table(pa.table({"prompt": [str(row) for row in range(32)]}), tmp_path / f"{name}.parquet")

    def attempt(number: int = 1, plan: dict[str, Any] | None = None, **changes: Any) -> Any:
        (tmp_path / "plan.json").write_text(json.dumps(plan or {}))
        data = {name: str(tmp_path / f"{name}.parquet") for name in ("train", "validation")}
        reports: list[Any] = []
        spec = stage(**{"model": str(model), "device": "cpu", **data, **changes})
        return run_verl_stage(spec, context(number, reports)), reports

    return attempt
