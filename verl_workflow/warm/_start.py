"""Starts a node's warm server ahead of time, and tells how processes are started through it."""

from __future__ import annotations

import fcntl
import logging
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from verl_workflow.warm._place import SOCKET, STUB, folder_of_server, python_command

_log = logging.getLogger(__name__)
# Below that, what is spared in seconds is not worth what it takes from the training.
_LEAST_MEMORY = 3 << 30


def warm_up() -> Path | None:
    """See to it that a server runs, or will soon; returns at once. Its folder, or None when there can be none.

    Whatever hinders it is logged, and processes are then started as without it.
    """
    try:
        import psutil

        folder = folder_of_server()
        if psutil.virtual_memory().available < _LEAST_MEMORY:
            _log.warning("no warm start: less than %d GiB of memory are free", _LEAST_MEMORY >> 30)
            return folder if (folder / SOCKET).exists() else None
        if not (folder / SOCKET).exists():
            _start(folder)
    except (OSError, ImportError) as error:
        _log.warning("no warm start: %s", error)
        return None
    return folder


def warm_command(folder: Path, arguments: Sequence[str], *, patience: float = 0.0) -> tuple[list[str], str]:
    """How to start ``python <arguments>`` through the server, and what stands in for ``python`` in Ray's workers.

    Args:
        patience: seconds to wait for a server that is still importing; then the command starts plain Python.
    """
    deadline = time.monotonic() + patience
    while not (folder / SOCKET).exists() and time.monotonic() < deadline and _is_importing(folder):
        time.sleep(0.1)
    command = [sys.executable, "-S", "-E", str(STUB), str(folder / SOCKET), *arguments]
    return command, python_command(folder)


def _is_importing(folder: Path) -> bool:
    """Whether a server lives there, which holds its lock."""
    try:
        with (folder / "lock").open("r") as lock:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
            return False
    except BlockingIOError:
        return True
    except FileNotFoundError:
        # It has been started and has not come so far.
        return True


def _start(folder: Path) -> None:
    # Single-threaded libraries: threads do not survive a fork.
    single = dict.fromkeys(("OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "NUMEXPR_NUM_THREADS"), "1")
    kept = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    with (folder / "log.txt").open("ab") as log:
        starter = subprocess.Popen(
            [sys.executable, "-m", "verl_workflow.warm._server", str(folder)],
            # jemalloc, which Arrow brings, has a thread of its own.
            env={
                **single,
                **kept,
                "TOKENIZERS_PARALLELISM": "false",
                # As in each of verl's processes; it is read when the library is imported.
                "HF_HUB_OFFLINE": "1",
                "JE_ARROW_MALLOC_CONF": "background_thread:false",
            },
            cwd="/",
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    # It goes on in a process of nobody's: a Ray worker takes its children with it when it ends.
    starter.wait()
