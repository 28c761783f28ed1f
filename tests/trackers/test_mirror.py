"""Senders as processes of their own, against a real MLflow server on loopback that comes and goes."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from _stage_files import facts, rows

from verl_workflow.trackers import Facts, Sender, behind, mirrored


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def wait_for(condition: Callable[[], Any], seconds: float = 240.0) -> Any:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if found := condition():
            return found
        time.sleep(0.2)
    raise AssertionError("it did not come to be")


class Server:
    """An MLflow server whose store outlives it."""

    def __init__(self, folder: Path) -> None:
        self.port = free_port()
        self.uri = f"http://127.0.0.1:{self.port}"
        self._folder = folder
        self._child: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        store = f"sqlite:///{self._folder}/server.db"
        command = [sys.executable, "-m", "mlflow", "server", "--backend-store-uri", store, "--host", "127.0.0.1"]
        with (self._folder / "server.log").open("ab") as log:
            self._child = subprocess.Popen(
                [*command, "--port", str(self.port), "--workers", "1"], stdout=log, stderr=log, start_new_session=True
            )
        wait_for(self._answers)

    def stop(self) -> None:
        if self._child is not None:
            os.killpg(self._child.pid, signal.SIGKILL)
            self._child.wait()
            self._child = None

    def steps(self) -> list[int]:
        from mlflow import MlflowClient

        client = MlflowClient(tracking_uri=self.uri)
        experiment = client.get_experiment_by_name("nightly")
        found = client.search_runs([experiment.experiment_id]) if experiment is not None else []
        return [metric.step for run in found for metric in client.get_metric_history(run.info.run_id, "timing_s/step")]

    def _answers(self) -> bool:
        try:
            return httpx.get(f"{self.uri}/health", timeout=2).status_code == 200
        except httpx.HTTPError:
            return False


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    pytest.importorskip("mlflow.server")
    found = Server(tmp_path)
    yield found
    found.stop()


def nightly(stage_dir: Path, uri: str) -> Facts:
    return facts(stage_dir, {"kind": "mlflow", "uri": uri, "experiment": "nightly"})


def test_what_is_written_arrives_while_the_training_goes_on(tmp_path: Path, server: Server) -> None:
    server.start()
    with mirrored(tmp_path, nightly(tmp_path, server.uri)):
        rows(tmp_path, 1, [1, 2])
        wait_for(lambda: server.steps() == [1, 2])
        rows(tmp_path, 1, [3])
    # What came last is sent before it is over.
    assert server.steps() == [1, 2, 3]


def test_a_server_that_is_down_and_comes_back_loses_nothing(tmp_path: Path, server: Server) -> None:
    server.start()
    stage = nightly(tmp_path, server.uri)
    with mirrored(tmp_path, stage):
        rows(tmp_path, 1, [1])
        wait_for(lambda: server.steps() == [1])
        server.stop()
        rows(tmp_path, 1, [2, 3])
    log = (tmp_path / "trackers/0-mlflow.log").read_text()
    assert "Connection refused" in log or "MlflowException" in log
    [told] = behind(tmp_path, stage)
    assert told == f"mlflow has not taken 2 of the steps up to 3: `verl-workflow sync {stage.run_id}` sends them"
    server.start()
    with mirrored(tmp_path, stage):
        rows(tmp_path, 2, [3, 4])
        wait_for(lambda: server.steps() == [1, 2, 3, 4])
    assert behind(tmp_path, stage) == []


def test_a_server_that_never_answers_ends_with_the_training(tmp_path: Path) -> None:
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        uri = f"http://127.0.0.1:{silent.getsockname()[1]}"
        rows(tmp_path, 1, [1])
        with mirrored(tmp_path, nightly(tmp_path, uri)):
            time.sleep(1)
    assert Sender(tmp_path, nightly(tmp_path, uri), 0).sent == 0
    with Sender(tmp_path, nightly(tmp_path, uri), 0).alone() as alone:
        assert alone


def test_a_sender_ends_when_its_supervisor_was_killed(tmp_path: Path) -> None:
    tracker = {"kind": "tensorboard", "folder": None}
    facts(tmp_path, tracker)
    code = (
        "import time\nfrom pathlib import Path\nfrom verl_workflow.trackers import kept, mirrored\n"
        f"stage = Path({str(tmp_path)!r})\n"
        "with mirrored(stage, kept(stage)):\n    print('up', flush=True)\n    time.sleep(600)\n"
    )
    supervisor = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
    assert supervisor.stdout is not None
    supervisor.stdout.readline()
    rows(tmp_path, 1, [1])
    stage = Sender(tmp_path, facts(tmp_path, tracker), 0)
    wait_for(lambda: (tmp_path / "trackers/0-tensorboard.json").exists())
    supervisor.kill()
    supervisor.wait()
    rows(tmp_path, 1, [2])

    def over() -> bool:
        with stage.alone() as alone:
            return alone

    wait_for(over)
    assert stage.sent in (1, 2)


def test_without_trackers_nothing_is_started_or_written(tmp_path: Path) -> None:
    with mirrored(tmp_path, Facts(run_id="r", stage="s", records="x", trackers=[])):
        pass
    assert list(tmp_path.iterdir()) == []
