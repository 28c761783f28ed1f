from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from verl_workflow.training._process import ChildProcess, tail

FAMILY = """
import subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
print(child.pid, flush=True)
time.sleep(600)
"""
STUBBORN = "import signal, time\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\nprint('ready', flush=True)\n"


def alive(pid: int) -> bool:
    try:
        status = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except FileNotFoundError:
        return False
    return status != "Z"


def wait_until(condition: Callable[[], bool]) -> None:
    for _ in range(600):
        if condition():
            return
        time.sleep(0.05)
    pytest.fail("it never happened")


def start(code: str, log: Path, grace: float = 10.0) -> ChildProcess:
    return ChildProcess([sys.executable, "-c", code], env=os.environ, log=log, grace=grace)


def test_exit_code_and_output_are_kept(tmp_path: Path) -> None:
    with start("import sys; print('out'); print('err', file=sys.stderr); sys.exit(3)", tmp_path / "log") as child:
        assert child.wait(60) == 3
    assert sorted(tail(tmp_path / "log").splitlines()) == ["err", "out"]


def test_the_whole_family_is_gone_when_the_caller_fails(tmp_path: Path) -> None:
    log = tmp_path / "log"
    with pytest.raises(RuntimeError), start(FAMILY, log) as child:
        wait_until(lambda: bool(tail(log)))
        grandchild = int(tail(log))
        assert alive(grandchild)
        raise RuntimeError
    assert child.poll() == -signal.SIGTERM
    wait_until(lambda: not alive(grandchild))


def test_children_of_a_process_that_died_are_stopped_too(tmp_path: Path) -> None:
    log = tmp_path / "log"
    with start(FAMILY, log) as child:
        wait_until(lambda: bool(tail(log)))
        grandchild = int(tail(log))
        os.kill(child.pid, signal.SIGKILL)
        assert child.wait(60) == -signal.SIGKILL
    wait_until(lambda: not alive(grandchild))


def test_a_process_that_ignores_sigterm_is_killed(tmp_path: Path) -> None:
    log = tmp_path / "log"
    with start(STUBBORN + "time.sleep(600)", log, grace=0.2) as child:
        wait_until(lambda: bool(tail(log)))
    assert child.poll() == -signal.SIGKILL


def test_the_entry_dies_with_its_supervisor(tmp_path: Path) -> None:
    log = tmp_path / "log"
    watched = (
        "import os, time\nfrom verl_workflow.training.entry import _die_with\n"
        "_die_with(os.getppid())\nprint(os.getpid(), flush=True)\ntime.sleep(600)\n"
    )
    supervisor = (
        "import os, sys\nfrom pathlib import Path\nfrom verl_workflow.training._process import ChildProcess\n"
        f"ChildProcess([sys.executable, '-c', {watched!r}], env=os.environ, log=Path({str(log)!r})).wait()\n"
    )
    process = subprocess.Popen([sys.executable, "-c", supervisor])
    wait_until(lambda: bool(tail(log)))
    entry = int(tail(log))
    process.kill()
    process.wait()
    wait_until(lambda: not alive(entry))


def test_tail_is_bounded_and_plain(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_text("\x1b[36m(worker)\x1b[0m said\n")
    assert tail(path) == "(worker) said"
    path.write_bytes(b"".join(b"%d\n" % number for number in range(10_000)))
    assert tail(path, lines=2) == "9998\n9999"
    assert len(tail(path, lines=10_000, limit=100)) <= 100
    assert tail(tmp_path / "none") == ""
