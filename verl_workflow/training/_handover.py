"""A sign to verl's driver: save after this step, and end, for the node is being taken away."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

_FILE = "hand-over"


class HandedOver(RuntimeError):
    """The training has saved and ended because it was asked to."""


def ask(attempt_dir: Path) -> None:
    """Ask the attempt's training to save and end; asking twice is as asking once."""
    (attempt_dir / _FILE).touch()


def is_asked(attempt_dir: Path) -> bool:
    """Whether it has been asked."""
    return (attempt_dir / _FILE).exists()


@contextmanager
def asked_by_sigterm(attempt_dir: Path) -> Iterator[None]:
    """Within, the first SIGTERM to this process asks the attempt's training; a further one does what it did before.

    Only the main thread can hear signals: in any other nothing changes.
    """
    before = signal.getsignal(signal.SIGTERM) if threading.current_thread() is threading.main_thread() else None
    if before is None:
        yield
        return

    def terminated(number: int, frame: FrameType | None) -> None:
        signal.signal(signal.SIGTERM, before)
        ask(attempt_dir)

    signal.signal(signal.SIGTERM, terminated)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
