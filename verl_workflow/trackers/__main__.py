"""``python -m verl_workflow.trackers <stage dir> <number> <supervisor>``: sends until it is told to end.

A process of its own, for a client of a tracker may hang, leak or exit as it likes. SIGTERM asks it to send what is
left and to end; it does so by itself when its supervisor is gone.
"""

from __future__ import annotations

import os
import signal
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from types import FrameType

from verl_workflow.trackers._facts import kept
from verl_workflow.trackers._sender import Sender

_LOOK_SECONDS = 2.0
_PAUSE_SECONDS = (5.0, 60.0)
# Nobody waits for the last words longer than that.
_LAST_SECONDS = 20


def main(stage_dir: Path, number: int, supervisor: int) -> int:
    """0 when everything has been sent, 1 when something is left."""
    ending = False

    def end(_: int, __: FrameType | None) -> None:
        nonlocal ending
        ending = True
        signal.alarm(_LAST_SECONDS)

    signal.signal(signal.SIGTERM, end)
    facts = kept(stage_dir)
    assert facts is not None, "the stage keeps them before it starts this"
    sender = Sender(stage_dir, facts, number)
    pause, failed = _PAUSE_SECONDS[0], False
    with sender.alone() as alone:
        if not alone:
            return 1
        while True:
            # Asked first, so that what was written before is sent after.
            last = ending or os.getppid() != supervisor
            try:
                sender.flush()
                pause, failed = _PAUSE_SECONDS[0], False
            except Exception:  # noqa: BLE001 - whatever a client raises: it is asked again later
                failed = True
                traceback.print_exc()
                sender.drop()
            if last:
                sender.close()
                return int(failed)
            _wait(pause if failed else _LOOK_SECONDS, lambda: ending or os.getppid() != supervisor)
            pause = min(2 * pause, _PAUSE_SECONDS[1]) if failed else pause


def _wait(seconds: float, over: Callable[[], bool]) -> None:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline and not over():
        time.sleep(0.2)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])))
