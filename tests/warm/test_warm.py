"""Processes forked from a warm server behave as fresh ones, and end when they should."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from verl_workflow.warm import _place, _start, forked_for, warm_command, warm_up
from verl_workflow.warm._place import SOCKET, folder_of_server

TELL = """
import json, os, sys, random
print(json.dumps({
    "argv": sys.argv, "folder": os.getcwd(), "mark": os.environ.get("MARK"), "name": __name__,
    "group": os.getpgid(0) == os.getpid(), "stdin": sys.stdin.read(), "random": random.random(),
    "first": sys.path[0], "second": sys.path[1], "loaded": "decimal" in sys.modules,
}))
"""


def wait_for(condition: Callable[[], Any], seconds: float = 120.0) -> Any:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if found := condition():
            return found
        time.sleep(0.05)
    raise AssertionError("it did not come to be")


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Path]:
    """A server that has preloaded a small module."""
    folder = tmp_path / "a-folder-with-a-name-that-is-as-long-as-some-systems-like-theirs-to-be" / "warm"
    folder.mkdir(parents=True)
    code = (
        "from pathlib import Path\nfrom verl_workflow.warm._server import main\n"
        f"main(Path({str(folder)!r}), ('decimal', 'no_such_module'), idle_seconds=60)\n"
    )
    with (folder / "log.txt").open("wb") as log:
        process = subprocess.Popen([sys.executable, "-c", code], stdout=log, stderr=log, start_new_session=True)
    wait_for((folder / SOCKET).exists)
    (folder / "pid").write_text(str(process.pid))
    yield folder
    process.kill()
    process.wait()


def command(folder: Path, *arguments: str) -> list[str]:
    return warm_command(folder, arguments)[0]


def ask(folder: Path, *arguments: str, **options: Any) -> Any:
    done = subprocess.run(command(folder, *arguments), capture_output=True, text=True, timeout=60, **options)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def alive(pid: int) -> bool:
    return psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE


def test_a_script_runs_as_it_would_in_a_fresh_python(server: Path, tmp_path: Path) -> None:
    script = tmp_path / "tell.py"
    script.write_text(TELL)
    environment = {**os.environ, "MARK": "here", "PYTHONPATH": "/some/where"}
    told = ask(server, str(script), "a", "b", env=environment, cwd=tmp_path, input="words")
    assert told["argv"] == [str(script), "a", "b"]
    assert (told["folder"], told["mark"], told["name"], told["stdin"]) == (str(tmp_path), "here", "__main__", "words")
    assert (told["first"], told["second"]) == (str(tmp_path), "/some/where")
    assert told["group"]
    assert told["loaded"]
    assert ask(server, str(script), env=environment, cwd=tmp_path, input="")["random"] != told["random"]


def test_a_module_runs_as_it_would_in_a_fresh_python(server: Path, tmp_path: Path) -> None:
    (tmp_path / "tell.py").write_text(TELL)
    told = ask(server, "-m", "tell", "x", cwd=tmp_path, input="")
    assert told["argv"][1:] == ["x"]
    assert told["first"] == str(tmp_path)
    assert told["name"] == "__main__"


@pytest.mark.parametrize(
    ("body", "code"),
    [
        ("import sys; sys.exit(3)", 3),
        ("raise SystemExit('words')", 1),
        ("1 / 0", 1),
        ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", -9),
        ("import os, signal; os.kill(os.getpid(), signal.SIGTERM)", -15),
        ("import os; os._exit(7)", 7),
    ],
)
def test_it_ends_as_the_process_ends(server: Path, tmp_path: Path, body: str, code: int) -> None:
    script = tmp_path / "end.py"
    script.write_text(body)
    done = subprocess.run(command(server, str(script)), capture_output=True, text=True, timeout=60)
    assert done.returncode == code
    if body == "1 / 0":
        assert "ZeroDivisionError" in done.stderr


def test_what_is_registered_for_the_end_runs(server: Path, tmp_path: Path) -> None:
    script = tmp_path / "end.py"
    script.write_text("import atexit\natexit.register(print, 'the end')\nprint('the middle')\n")
    done = subprocess.run(command(server, str(script)), capture_output=True, text=True, timeout=60)
    assert done.stdout.split("\n")[:2] == ["the middle", "the end"]


SLEEPER = """
import os, subprocess, sys, time
child = subprocess.Popen(["sleep", "600"])
print(os.getpid(), child.pid, flush=True)
time.sleep(600)
"""


def sleeper(server: Path, tmp_path: Path, **options: Any) -> tuple[subprocess.Popen[str], int, int]:
    script = tmp_path / "sleeper.py"
    script.write_text(SLEEPER)
    process = subprocess.Popen(command(server, str(script)), stdout=subprocess.PIPE, text=True, **options)
    assert process.stdout is not None
    own, child = map(int, process.stdout.readline().split())
    return process, own, child


def test_sigterm_is_passed_on(server: Path, tmp_path: Path) -> None:
    process, own, child = sleeper(server, tmp_path)
    process.send_signal(signal.SIGTERM)
    assert process.wait(30) == -signal.SIGTERM
    wait_for(lambda: not alive(own) and not alive(child))


def test_nothing_outlives_a_stub_that_is_killed(server: Path, tmp_path: Path) -> None:
    process, own, child = sleeper(server, tmp_path)
    process.kill()
    process.wait()
    wait_for(lambda: not alive(own) and not alive(child))


def test_nothing_outlives_a_server_that_is_killed(server: Path, tmp_path: Path) -> None:
    process, own, child = sleeper(server, tmp_path)
    os.kill(int((server / "pid").read_text()), signal.SIGKILL)
    assert process.wait(30) == -signal.SIGKILL
    wait_for(lambda: not alive(own))
    os.kill(child, signal.SIGKILL)


def test_nothing_outlives_a_supervisor_that_is_killed(server: Path, tmp_path: Path) -> None:
    script = tmp_path / "sleeper.py"
    script.write_text(SLEEPER)
    code = (
        "import os, subprocess, sys\n"
        f"environment = {{**os.environ, 'VERL_WORKFLOW_SUPERVISOR': str(os.getpid())}}\n"
        f"subprocess.run({command(server, str(script))!r}, env=environment)\n"
    )
    supervisor = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert supervisor.stdout is not None
    own, child = map(int, supervisor.stdout.readline().split())
    supervisor.kill()
    supervisor.wait()
    wait_for(lambda: not alive(own) and not alive(child))


def test_the_process_behind_a_stub_is_known_while_it_lives(server: Path, tmp_path: Path) -> None:
    process, own, _ = sleeper(server, tmp_path)
    assert forked_for(psutil.Process(process.pid).cmdline(), process.pid) == own
    assert forked_for([sys.executable, "-c", "pass"], process.pid) is None
    words = psutil.Process(process.pid).cmdline()
    process.kill()
    process.wait()
    wait_for(lambda: forked_for(words, process.pid) is None)


def test_many_at_once_each_end_as_they_should(server: Path, tmp_path: Path) -> None:
    script = tmp_path / "end.py"
    script.write_text("import sys, time; time.sleep(0.2); sys.exit(int(sys.argv[1]))")
    started = [subprocess.Popen(command(server, str(script), str(number))) for number in range(12)]
    assert [process.wait(60) for process in started] == list(range(12))


def test_without_a_server_plain_python_is_started(tmp_path: Path) -> None:
    script = tmp_path / "tell.py"
    script.write_text(TELL)
    told = ask(tmp_path / "nowhere", str(script), "x", input="")
    assert not told["loaded"]
    assert told["argv"] == [str(script), "x"]


def test_a_socket_that_nobody_serves_is_as_none(server: Path, tmp_path: Path) -> None:
    os.kill(int((server / "pid").read_text()), signal.SIGKILL)
    wait_for(lambda: not alive(int((server / "pid").read_text())))
    script = tmp_path / "tell.py"
    script.write_text(TELL)
    assert not ask(server, str(script), input="")["loaded"]


def test_a_server_that_nobody_needs_ends(tmp_path: Path) -> None:
    code = (
        "from pathlib import Path\nfrom verl_workflow.warm._server import main\n"
        f"main(Path({str(tmp_path)!r}), (), idle_seconds=1)\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
    assert not (tmp_path / SOCKET).exists()


def test_there_is_one_server_in_a_folder(server: Path) -> None:
    code = (
        "from pathlib import Path\nfrom verl_workflow.warm._server import main\n"
        f"main(Path({str(server)!r}), (), idle_seconds=600)\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_a_server_with_threads_serves_nobody(tmp_path: Path) -> None:
    (tmp_path / "threaded.py").write_text(
        "import threading, time\nthreading.Thread(target=time.sleep, args=(9,)).start()\n"
    )
    code = (
        "import sys\nfrom pathlib import Path\n"
        f"sys.path.insert(0, {str(tmp_path)!r})\nfrom verl_workflow.warm._server import main\n"
        f"main(Path({str(tmp_path)!r}), ('threaded',), idle_seconds=600)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], check=True, timeout=60, capture_output=True, text=True)
    assert "would not be as good as a fresh process" in done.stderr


def test_what_shapes_imports_makes_another_server(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("tempfile.gettempdir", lambda: str(tmp_path))
    monkeypatch.delenv("OMP_PROC_BIND", raising=False)
    first = folder_of_server()
    assert folder_of_server() == first
    monkeypatch.setenv("OMP_PROC_BIND", "true")
    assert folder_of_server() != first
    monkeypatch.delenv("OMP_PROC_BIND")
    monkeypatch.setenv("RAY_JOB_ID", "x")
    assert folder_of_server() == first
    monkeypatch.setenv("PYTHONBREAKPOINT", "ray.util.rpdb.set_trace")
    monkeypatch.syspath_prepend("/where/ray/keeps/its/workers")
    assert folder_of_server() == first, "a driver and Ray's workers have one"
    monkeypatch.setattr(_place, "_PACKAGES", ("pytest",))
    assert folder_of_server() != first


def test_a_folder_that_others_can_write_to_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("tempfile.gettempdir", lambda: str(tmp_path))
    folder_of_server().chmod(0o770)
    with pytest.raises(PermissionError):
        folder_of_server()
    assert warm_up() is None


def test_no_server_is_started_where_memory_is_scarce(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("tempfile.gettempdir", lambda: str(tmp_path))
    monkeypatch.setattr(_start, "_LEAST_MEMORY", 1 << 60)
    assert warm_up() is None
    assert list(folder_of_server().iterdir()) == []


@pytest.mark.slow
def test_what_trainings_import_can_be_preloaded(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("tempfile.gettempdir", lambda: str(tmp_path))
    folder = warm_up()
    assert folder is not None
    wait_for((folder / SOCKET).exists, 180)
    script = tmp_path / "tell.py"
    script.write_text(
        "import sys, json, torch\n"
        "print(json.dumps({'modules': [name for name in ('torch', 'tensordict', 'transformers', 'ray', 'verl')"
        " if name in sys.modules], 'cuda': torch.cuda.is_initialized(), 'sum': torch.ones(64, 64).mm("
        "torch.ones(64, 64)).sum().item()}))\n"
    )
    told = ask(folder, str(script))
    assert told == {"modules": ["torch", "tensordict", "transformers"], "cuda": False, "sum": 64.0**3}
    [process] = [each for each in psutil.process_iter() if str(folder) in " ".join(_words(each))]
    process.kill()


def _words(process: psutil.Process) -> list[str]:
    try:
        return list(process.cmdline())
    except psutil.Error:
        return []
