"""The console script on a real, local Ray: stopped by a signal, resumed, and seen to leave nothing."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from verl_workflow.errors import UserError
from verl_workflow.storage import Store
from verl_workflow.workflow import RunStatus, StepStatus, read_run

CLI = Path(sys.executable).with_name("verl-workflow")
PATIENCE_S = 300.0

STEPS = """
import pathlib
import time


def first():
    return {"count": 4}


def second(count, hold, context):
    for step in range(600):
        context.report({"phase": "training", "step": step, "total": 600, "reward": 0.25, "step_seconds": 0.1})
        if not pathlib.Path(hold).exists():
            return {"total": 2 * count}
        time.sleep(0.1)
    raise RuntimeError("nobody let go")
"""

PIPELINE = """\
version: 1
name: sums
params:
  hold: {type: string}
stages:
  first:
    kind: python
    function: steps.py:first
  second:
    kind: python
    function: steps.py:second
    args: {count: "${first.count}", hold: "${params.hold}"}
"""

pytestmark = pytest.mark.timeout(900)


def _heed_ctrl_c() -> None:
    """What runs in the background of a shell ignores it, and hands that on."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


class Terminal:
    """A command whose stderr is a terminal of 100 columns, and whose stdout is a pipe."""

    def __init__(self, *arguments: str, cwd: Path) -> None:
        ours, theirs = os.openpty()
        environment = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
        self.process = subprocess.Popen(
            [str(CLI), *arguments],
            cwd=cwd,
            env={**environment, "TERM": "xterm", "COLUMNS": "100", "VERL_WORKFLOW_STORAGE": str(cwd / "storage")},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=theirs,
            start_new_session=True,
            preexec_fn=_heed_ctrl_c,
        )
        os.close(theirs)
        self.drawn = b""
        self._reader = threading.Thread(target=self._read, args=(ours,), daemon=True)
        self._reader.start()

    def _read(self, ours: int) -> None:
        try:
            while block := os.read(ours, 65536):
                self.drawn += block
        except OSError:
            # How a terminal says that its other side has been closed.
            pass
        finally:
            os.close(ours)

    def end(self) -> tuple[int, str, str]:
        """Exit code, stdout, and what was drawn, without control sequences."""
        out, _ = self.process.communicate(timeout=PATIENCE_S)
        self._reader.join(30)
        drawn = re.sub(rb"\x1b\[[0-9;?]*[A-Za-z]", b"", self.drawn)
        return self.process.returncode, out.decode(), drawn.decode()


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    (tmp_path / "steps.py").write_text(STEPS)
    (tmp_path / "pipeline.yaml").write_text(PIPELINE)
    (tmp_path / "hold").touch()
    yield tmp_path


@pytest.mark.parametrize(
    ("number", "expected"),
    [
        pytest.param(signal.SIGINT, 130, id="ctrl-c"),
        pytest.param(signal.SIGTERM, 143, id="terminated", marks=pytest.mark.slow),
    ],
)
def test_a_stopped_run_says_so_leaves_nothing_and_is_resumed(
    folder: Path, number: signal.Signals, expected: int
) -> None:
    store = Store(str(folder / "storage"))
    arguments = ("run", "pipeline.yaml", "--run-id", "r1", "-p", f"hold={folder / 'hold'}")
    first = Terminal(*arguments, cwd=folder)
    family: list[psutil.Process] = []
    try:
        wait_for_second(store, first)
        time.sleep(1.5)
        family = psutil.Process(first.process.pid).children(recursive=True)
        assert family
        if number is signal.SIGINT:
            # A terminal sends Ctrl-C to the whole group, Ray's processes included.
            os.killpg(first.process.pid, number)
        else:
            # As `kill` and `timeout` do.
            first.process.send_signal(number)
        code, out, drawn = first.end()
    finally:
        stop(first, family)
    assert code == expected, drawn
    assert out == ""
    assert "second  running" in drawn
    assert re.search(r"━* ?─+ \d+/600", drawn)
    assert "stopped run r1; what has been done is kept" in drawn
    assert f"resume with: verl-workflow resume r1 --storage {folder / 'storage'}" in drawn
    assert "Traceback" not in drawn
    assert "***" not in drawn
    _, alive = psutil.wait_procs(family, timeout=120)
    assert not alive

    assert read_run(store, "r1").status in {RunStatus.RUNNING, RunStatus.RESUMABLE}
    (folder / "hold").unlink()
    again = Terminal("resume", "r1", cwd=folder)
    try:
        code, out, drawn = again.end()
    finally:
        stop(again, [])
    assert code == 0, drawn
    assert '{"total": 8}' in out
    state = read_run(store, "r1")
    assert state.status is RunStatus.SUCCEEDED
    assert [len(state.steps[name].attempts) for name in ("first", "second")] == [1, 2]


DYING = """\
version: 1
name: dying
stages:
  first:
    kind: python
    function: dying.py:first
    retry: {attempts: 2, backoff: 0}
"""


def test_json_is_one_document_though_a_worker_dies(folder: Path) -> None:
    (folder / "dying.yaml").write_text(DYING)
    (folder / "dying.py").write_text(
        "import os\n\ndef first(context):\n    return os._exit(1) if context.attempt == 1 else {'count': 4}\n"
    )
    environment = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
    done = subprocess.run(
        [str(CLI), "run", "dying.yaml", "--run-id", "r1", "--storage", str(folder / "storage"), "--json"],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    assert [stage["attempt"] for stage in json.loads(done.stdout)["stages"]] == [2]


def wait_for_second(store: Store, terminal: Terminal) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline:
        assert terminal.process.poll() is None, terminal.end()
        try:
            state = read_run(store, "r1")
        except UserError:
            state = None
        if state and "second" in state.steps and state.steps["second"].status is StepStatus.RUNNING:
            return
        time.sleep(0.1)
    raise AssertionError("the second stage did not start")


def stop(terminal: Terminal, family: list[psutil.Process]) -> None:
    """End what this test started, if it has not ended by itself."""
    if terminal.process.poll() is None:
        family = [*family, *psutil.Process(terminal.process.pid).children(recursive=True)]
        terminal.process.kill()
        terminal.process.wait(30)
    for process in family:
        if process.is_running():
            process.kill()
