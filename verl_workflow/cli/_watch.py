"""Stay with a run until it ends or its driver is gone."""

from __future__ import annotations

import signal
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

POLL_S = 0.5


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
        # Ignored on purpose, as by `nohup`: it stays ignored.
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
    driver_error: Callable[[], object | None],
    ended_epoch: int | None = None,
) -> tuple[RunFacts, object | None]:
    """Show the run until it ends.

    Args:
        driver_error: why the driver stopped without ending the run, None while it works.
        ended_epoch: the run had ended under this epoch before it was taken up; that end is passed over.

    Returns:
        The last state, and why the driver stopped without ending the run, or None when the run has ended.
    """
    from verl_workflow.workflow import read_run

    lost: object | None = None
    while True:
        state = read_run(store, run_id)
        facts = facts_of(state, store.uri)
        view.show(facts)
        ended = facts.ended and facts.epoch != ended_epoch
        if ended or lost is not None:
            return facts_of(state, store.uri, values=True), None if ended else lost
        # Once lost, one more look: the driver may have ended the run in between.
        lost = driver_error()
        if lost is None:
            time.sleep(POLL_S)


def _terminated(number: int, frame: FrameType | None) -> None:
    raise Terminated
