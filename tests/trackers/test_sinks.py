from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from _stage_files import facts, rows

from verl_workflow.trackers import Sender


@pytest.fixture(autouse=True)
def quiet(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("WANDB_DIR", str(tmp_path))
    monkeypatch.setenv("WANDB_SILENT", "true")
    monkeypatch.setenv("GIT_PYTHON_REFRESH", "quiet")


def flush(stage_dir: Path, tracker: dict[str, Any], run_id: str = "night-1") -> int:
    sender = Sender(stage_dir, facts(stage_dir, tracker, run_id=run_id), 0)
    count = sender.flush()
    sender.close()
    return count


@pytest.fixture
def mlflow_uri(tmp_path: Path) -> Iterator[str]:
    yield f"sqlite:///{tmp_path}/mlflow.db"


def mlflow_runs(uri: str) -> list[Any]:
    from mlflow import MlflowClient

    client = MlflowClient(tracking_uri=uri)
    experiment = client.get_experiment_by_name("nightly")
    assert experiment is not None
    return list(client.search_runs([experiment.experiment_id]))


def test_mlflow_has_one_run_over_all_attempts(tmp_path: Path, mlflow_uri: str) -> None:
    from mlflow import MlflowClient

    tracker = {"kind": "mlflow", "uri": mlflow_uri, "experiment": "nightly"}
    rows(tmp_path, 1, [1, 2, 3], **{"val-core/x/acc/mean@1": 0.5})
    assert flush(tmp_path, tracker) == 3
    rows(tmp_path, 2, [3, 4])
    assert flush(tmp_path, tracker) == 1
    [run] = mlflow_runs(mlflow_uri)
    assert run.info.run_name == "night-1.train"
    assert run.data.params == {"actor_rollout_ref.actor.optim.lr": "1e-06"}
    assert run.data.tags["verl_workflow.run"] == "night-1"
    assert run.data.tags["model"] == "ab12"
    client = MlflowClient(tracking_uri=mlflow_uri)
    history = client.get_metric_history(run.info.run_id, "critic/score/mean")
    assert [(metric.step, metric.value) for metric in history] == [(1, 10.01), (2, 10.02), (3, 10.03), (4, 20.04)]
    assert len(client.get_metric_history(run.info.run_id, "val-core/x/acc/mean_at_1")) == 3


def test_mlflow_tells_what_it_holds(tmp_path: Path, mlflow_uri: str) -> None:
    tracker = {"kind": "mlflow", "uri": mlflow_uri, "experiment": "nightly"}
    rows(tmp_path, 1, [1, 2])
    flush(tmp_path, tracker)
    (tmp_path / "trackers/0-mlflow.json").unlink()
    assert flush(tmp_path, tracker) == 0


def test_another_run_is_another_run_there(tmp_path: Path, mlflow_uri: str) -> None:
    tracker = {"kind": "mlflow", "uri": mlflow_uri, "experiment": "nightly"}
    for name in ("one", "two"):
        rows(tmp_path / name, 1, [1])
        flush(tmp_path / name, tracker, run_id=name)
    assert len(mlflow_runs(mlflow_uri)) == 2


def test_tensorboard_has_each_step_once_over_all_attempts(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    tracker = {"kind": "tensorboard", "folder": str(tmp_path / "boards")}
    rows(tmp_path, 1, [1, 2])
    flush(tmp_path, tracker)
    rows(tmp_path, 2, [2, 3])
    flush(tmp_path, tracker)
    board = EventAccumulator(str(tmp_path / "boards/night-1/train"))
    board.Reload()
    found = [(event.step, round(event.value, 2)) for event in board.Scalars("critic/score/mean")]
    assert found == [(1, 10.01), (2, 10.02), (3, 20.03)]


def test_tensorboard_needs_no_torch(tmp_path: Path) -> None:
    rows(tmp_path, 1, [1])
    facts(tmp_path, {"kind": "tensorboard", "folder": None})
    code = (
        "import sys\nfrom pathlib import Path\nfrom verl_workflow.trackers import Sender, kept\n"
        f"stage = Path({str(tmp_path)!r})\nsender = Sender(stage, kept(stage), 0)\n"
        "assert sender.flush() == 1\nsender.close()\nassert not {'torch', 'ray'} & set(sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, env=dict(os.environ))


def test_wandb_writes_for_a_later_sync_when_it_is_offline(tmp_path: Path) -> None:
    tracker = {"kind": "wandb", "project": "p", "entity": None, "mode": "offline"}
    rows(tmp_path, 1, [1, 2])
    assert flush(tmp_path, tracker) == 2
    [file] = (tmp_path / "trackers/0-wandb").glob("wandb/offline-run-*/*.wandb")
    assert facts(tmp_path, tracker).identity in file.name
    assert [record.history.step.num for record in wandb_records(file) if record.HasField("history")] == [1, 2]


def wandb_records(file: Path) -> Iterator[Any]:
    """Records of a run's file: after seven bytes, LevelDB's log format, here in less than one block."""
    from wandb.proto.wandb_internal_pb2 import Record

    data = file.read_bytes()[7:]
    while len(data) > 7:
        length = int.from_bytes(data[4:6], "little")
        record = Record()
        record.ParseFromString(data[7 : 7 + length])
        yield record
        data = data[7 + length :]
