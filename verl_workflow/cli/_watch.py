"""Stay with a run until it ends or its driver is gone."""

from __future__ import annotations

import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import TYPE_CHECKING

from verl_workflow.cli._facts import RunFacts, facts_of
from verl_workflow.cli._view import View

if TYPE_CHECKING:
    from verl_workflow.storage import Store

_POLL_S = 0.5
_HEAD_CHECK_S = 2.0
# A head that is restarted in place (KubeRay) is away for a while; one on this machine is not restarted by anybody.
_HEAD_PATIENCE_S = {True: 6.0, False: 45.0}


class Terminated(KeyboardInterrupt):
    """The process was asked to end by SIGTERM or SIGHUP."""


@contextmanager
def signals_as_interrupts() -> Iterator[None]:
    """Let SIGTERM and SIGHUP unwind the stack as Ctrl-C does, so that a local cluster is not left behind."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {}
    for number in (signal.SIGTERM, signal.SIGHUP):
        # Ignored by `nohup` on purpose.
        if signal.getsignal(number) is not signal.SIG_IGN:
            before[number] = signal.signal(number, _terminated)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def watch(
    store: Store,
    run_id: str,
    view: View,
    *,
    driver_error: Callable[[], str | None],
    head: Head | None = None,
) -> tuple[RunFacts, str | None]:
    """Show the run until it ends.

    Returns:
        The last state, and why the driver stopped without ending the run, or None when the run has ended.
    """
    from verl_workflow.workflow import read_run

    while True:
        facts = facts_of(read_run(store, run_id), store.uri)
        view.show(facts)
        if facts.ended:
            return facts, None
        lost = driver_error() or (head.lost() if head is not None else None)
        if lost is not None:
            # The driver may have ended the run in between.
            facts = facts_of(read_run(store, run_id), store.uri)
            view.show(facts)
            return facts, None if facts.ended else lost
        time.sleep(_POLL_S)


class Head:
    """The head of the Ray cluster, watched by its port.

    Ray itself ends a process that misses its head for a minute, without a word to the user.

    Args:
        address: ``host:port`` of the head's control service.
        local: whether it was started by this process.
    """

    def __init__(self, address: str, *, local: bool, clock: Callable[[], float] = time.monotonic) -> None:
        host, _, port = address.rpartition(":")
        self._place = (host.strip("[]"), int(port))
        self._address = address
        self._patience = _HEAD_PATIENCE_S[local]
        self._clock = clock
        self._next = clock()
        self._silent_since: float | None = None

    def lost(self) -> str | None:
        """Why the head counts as gone, or None."""
        now = self._clock()
        if now < self._next:
            return None
        self._next = now + _HEAD_CHECK_S
        try:
            socket.create_connection(self._place, timeout=_HEAD_CHECK_S).close()
        except OSError:
            if self._silent_since is None:
                self._silent_since = now
            if now - self._silent_since < self._patience:
                return None
            return f"the head of the Ray cluster at {self._address} is gone"
        self._silent_since = None
        return None


def _terminated(number: int, frame: FrameType | None) -> None:
    raise Terminated
