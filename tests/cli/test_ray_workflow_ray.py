"""`ray-workflow` on real Ray: resumed on a cluster and on this machine, left by Ctrl-C."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from _one_step import run_workflow

from verl_workflow.storage import Store
from verl_workflow.workflow import RunStatus, StepStatus, read_run

pytestmark = pytest.mark.timeout(600)
PATIENCE_S = 240.0
PROGRAM = "from verl_workflow.cli import ray_workflow_main; ray_workflow_main()"
PIPELINE_PROGRAM = "from verl_workflow.cli import main; main()"
PIPELINE = """\
version: 1
name: nightly
stages:
  first:
    kind: python
    function: steps.py:first
    args: {mended: "MENDED"}
    retry: {attempts: 1}
"""


@pytest.fixture(scope="module")
def cluster() -> Iterator[str]:
    """Address of a Ray of this process. Its sockets need a short path."""
    import ray

    folder = tempfile.mkdtemp(prefix="vw-", dir="/tmp")
    ray.init(address="local", num_cpus=4, include_dashboard=False, log_to_driver=False, _temp_dir=folder)
    try:
        yield ray.get_runtime_context().gcs_address
    finally:
        ray.shutdown()
        shutil.rmtree(folder, ignore_errors=True)


def command(*arguments: str, cwd: Path, program: str = PROGRAM, **more: Any) -> subprocess.Popen[str]:
    """The console script, with nothing on its path but what is installed and this repository."""
    environment = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
    environment["PYTHONPATH"] = str(Path(__file__).parents[2])
    return subprocess.Popen(
        [sys.executable, "-c", program, *arguments, "--storage", str(cwd / "storage")],
        cwd=cwd,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        # What runs in the background of a shell ignores Ctrl-C, and hands that on.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler) and None,
        **more,
    )


def ended(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    try:
        out, err = process.communicate(timeout=PATIENCE_S)
    finally:
        if process.poll() is None:
            process.kill()
    return process.returncode, out, err


def once_mended(folder: Path) -> Callable[[], int]:
    def step() -> int:
        if not (folder / "mended").exists():
            raise RuntimeError("not mended yet")
        (folder / "executed").open("a").write(".")
        return 7

    return step


def once_let_go(folder: Path) -> Callable[[], int]:
    def step() -> int:
        if not (folder / "mended").exists():
            raise RuntimeError("not mended yet")
        (folder / "begun").touch()
        while not (folder / "go").exists():
            time.sleep(0.05)
        return 8

    return step


def await_status(store: Store, workflow_id: str, wanted: RunStatus) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while (found := read_run(store, workflow_id).status) is not wanted:
        assert time.monotonic() < deadline, found
        time.sleep(0.1)


def test_a_failed_workflow_is_resumed_on_this_machine(tmp_path: Path) -> None:
    store = Store(str(tmp_path / "storage"))
    run_workflow(store, "w", once_mended(tmp_path))
    assert read_run(store, "w").status is RunStatus.FAILED
    (tmp_path / "mended").touch()
    code, out, err = ended(command("resume", "w", "--json", cwd=tmp_path))
    assert code == 0, err
    told = json.loads(out)
    assert (told["status"], told["tasks"][0]["attempts"]) == ("SUCCESSFUL", 2)
    assert "Traceback" not in err
    assert (tmp_path / "executed").read_text() == "."


def test_a_workflow_that_fails_again_exits_with_1_and_says_how_to_go_on(tmp_path: Path, cluster: str) -> None:
    store = Store(str(tmp_path / "storage"))
    run_workflow(store, "w", once_mended(tmp_path))
    code, out, err = ended(command("resume", "w", "--address", cluster, "--json", cwd=tmp_path))
    assert code == 1, err
    assert json.loads(out)["status"] == "FAILED"
    assert "resume with: ray-workflow resume w --storage" in err


def test_a_fork_runs_on_a_cluster_under_its_own_id(tmp_path: Path, cluster: str) -> None:
    store = Store(str(tmp_path / "storage"))
    (tmp_path / "mended").touch()
    run_workflow(store, "w", once_mended(tmp_path))
    code, out, err = ended(
        command("fork", "w", "only", "--new-id", "copy", "--address", cluster, "--json", cwd=tmp_path)
    )
    assert code == 0, err
    assert (json.loads(out)["workflow_id"], json.loads(out)["status"]) == ("copy", "SUCCESSFUL")
    assert (tmp_path / "executed").read_text() == ".."
    assert read_run(store, "copy").definition["workflow"]["forked_from"] == {"workflow_id": "w", "step": "only"}


def test_ctrl_c_leaves_the_workflow_running_on_a_joined_cluster(tmp_path: Path, cluster: str) -> None:
    store = Store(str(tmp_path / "storage"))
    run_workflow(store, "w", once_let_go(tmp_path))
    (tmp_path / "mended").touch()
    process = command("resume", "w", "--address", cluster, "--json", cwd=tmp_path)
    try:
        deadline = time.monotonic() + PATIENCE_S
        while not (tmp_path / "begun").exists():
            assert process.poll() is None, process.communicate()
            assert time.monotonic() < deadline
            time.sleep(0.1)
        process.send_signal(signal.SIGINT)
    finally:
        code, out, err = ended(process)
    assert code == 130, err
    assert json.loads(out)["interrupted"] is True
    assert "left workflow w, which goes on in the cluster" in err
    assert "stop it with: ray-workflow cancel w --storage" in err
    assert "Traceback" not in err
    state = read_run(store, "w")
    assert (state.status, state.steps["only"].status) == (RunStatus.RUNNING, StepStatus.RUNNING)
    # Whoever comes meanwhile is told so, and starts nothing.
    code, out, _ = ended(command("resume", "w", "--address", cluster, "--json", cwd=tmp_path))
    assert (code, json.loads(out)["error"]["code"]) == (2, "run_owned")
    (tmp_path / "go").touch()
    await_status(store, "w", RunStatus.SUCCEEDED)
    assert len(read_run(store, "w").steps["only"].attempts) == 2


def test_a_cluster_that_does_not_answer_is_told_at_once(tmp_path: Path) -> None:
    store = Store(str(tmp_path / "storage"))
    run_workflow(store, "w", once_mended(tmp_path))
    before = store.list("")
    code, out, err = ended(command("resume", "w", "--address", "127.0.0.1:1", "--json", cwd=tmp_path))
    assert (code, json.loads(out)["error"]["code"]) == (1, "cluster_unreachable"), err
    assert store.list("") == before


def test_resume_all_takes_up_both_kinds(tmp_path: Path, cluster: str) -> None:
    (tmp_path / "steps.py").write_text(
        "import pathlib\n\n\ndef first(mended):\n    assert pathlib.Path(mended).exists()\n    return {'count': 4}\n"
    )
    (tmp_path / "pipeline.yaml").write_text(PIPELINE.replace("MENDED", str(tmp_path / "mended")))
    code, _, err = ended(
        command("run", "pipeline.yaml", "--run-id", "p", "--address", cluster, cwd=tmp_path, program=PIPELINE_PROGRAM)
    )
    assert code == 1, err
    store = Store(str(tmp_path / "storage"))
    run_workflow(store, "w", once_mended(tmp_path))
    (tmp_path / "mended").touch()
    code, out, err = ended(command("resume-all", "--json", cwd=tmp_path))
    assert (code, json.loads(out)["workflows"]) == (0, []), err
    code, out, err = ended(command("resume-all", "--include-failed", "--address", cluster, "--json", cwd=tmp_path))
    assert code == 0, err
    assert {each["workflow_id"]: each["status"] for each in json.loads(out)["workflows"]} == {
        "p": "SUCCESSFUL",
        "w": "SUCCESSFUL",
    }
    assert read_run(store, "p").steps["first"].value == {"count": 4}
