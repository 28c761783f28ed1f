"""Time that has passed, a sleep of the machine included."""

from __future__ import annotations

import time

# Python's monotonic clock stands still while Linux is suspended, and so misses that others had all that time.
_BOOT = getattr(time, "CLOCK_BOOTTIME", None)


def clock() -> float:
    """Seconds from some point on, never fewer than before; they count while the machine is suspended too."""
    return time.monotonic() if _BOOT is None else time.clock_gettime(_BOOT)
