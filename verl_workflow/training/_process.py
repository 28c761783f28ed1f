"""One child process with all its children: started, watched, and never left behind."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

_COLOUR = re.compile(r"\x1b\[[0-9;]*m")


class ChildProcess:
    """A command in its own session, its output in a file.

    Use it as a context manager: on the way out, whatever the reason, the whole process group is gone.

    Args:
        command: program and arguments.
        env: the whole environment.
        log: file that takes stdout and stderr; appended to.
        cwd: working directory, by default the caller's.
        grace: seconds between SIGTERM and SIGKILL.
    """

    def __init__(
        self,
        command: Sequence[str],
        *,
        env: Mapping[str, str],
        log: Path,
        cwd: Path | None = None,
        grace: float = 10.0,
    ) -> None:
        self._grace = grace
        with log.open("ab") as stream:
            self._child = subprocess.Popen(
                list(command),
                env=dict(env),
                cwd=cwd,
                stdin=subprocess.DEVNULL,
                stdout=stream,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    @property
    def pid(self) -> int:
        """Of the process, and of its session and group."""
        return self._child.pid

    def poll(self) -> int | None:
        """Exit code, negative for a signal; None while it runs."""
        return self._child.poll()

    def wait(self, timeout: float | None = None) -> int | None:
        """As `poll`, after waiting up to `timeout` seconds."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._child.wait(timeout)
        return self._child.poll()

    def ask_to_end(self) -> None:
        """SIGTERM to the group; returns at once."""
        self._signal(signal.SIGTERM)

    def stop(self) -> None:
        """SIGTERM to the group, SIGKILL to what is left of it after the grace period; returns when it is gone."""
        if self._signal(signal.SIGTERM):
            deadline = time.monotonic() + self._grace
            while self._alive() and time.monotonic() < deadline:
                self.wait(0.05)
            self._signal(signal.SIGKILL)
        self._child.wait()

    def __enter__(self) -> ChildProcess:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def _alive(self) -> bool:
        # Reap the leader first: a zombie would count as alive.
        self._child.poll()
        return self._signal(0)

    def _signal(self, number: int) -> bool:
        """False when no process of the group is left."""
        try:
            os.killpg(self.pid, number)
        except ProcessLookupError:
            return False
        except PermissionError:
            # Only zombies that another process has to reap.
            return False
        return True


def tail(path: Path, lines: int = 40, limit: int = 64 << 10) -> str:
    """The last lines of a text file, of at most `limit` bytes; empty when it is not there. Colours are left out."""
    try:
        with path.open("rb") as stream:
            stream.seek(max(0, stream.seek(0, os.SEEK_END) - limit))
            text = stream.read().decode("utf-8", errors="replace")
    except FileNotFoundError:
        return ""
    return "\n".join(_COLOUR.sub("", text).splitlines()[-lines:])
