"""Who drives a run, and whether that process is known to be dead."""

from __future__ import annotations

import os
import socket
import uuid
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def this_process() -> dict[str, Any]:
    """The calling process as an owner: unique, and recognisable to others on the same host.

    Keys: ``id`` (new in each call), ``host``, ``boot`` and ``pids`` (kernel boot and process-number space, empty where
    the system has no /proc), ``pid``, ``started`` (clock ticks after boot, None without /proc).
    """
    return {"id": uuid.uuid4().hex, **_host(), "pid": os.getpid(), "started": _started(os.getpid())}


def is_rebuilt() -> bool:
    """Whether the calling actor has died before, and was started again by Ray."""
    import ray

    with warnings.catch_warnings():
        # Ray asks itself by a name that it warns of.
        warnings.simplefilter("ignore")
        return bool(ray.get_runtime_context().was_current_actor_reconstructed)


def is_dead(owner: Mapping[str, Any]) -> bool:
    """True only when the owner ran on this host and its process is seen to be gone; False when in doubt."""
    here = _host()
    if not here["boot"] or any(owner.get(name) != value for name, value in here.items()):
        return False
    if not isinstance(owner.get("pid"), int) or owner.get("started") is None:
        return False
    return bool(_started(owner["pid"]) != owner["started"])


def _host() -> dict[str, str]:
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        # Containers of one host number their processes apart and may share its name.
        pids = str(Path("/proc/self/ns/pid").readlink())
    except OSError:
        boot = pids = ""
    return {"host": socket.gethostname(), "boot": boot, "pids": pids}


def _started(pid: int) -> int | None:
    """When a process started, in clock ticks after boot; None when there is none or only its zombie."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] in {"Z", "X"} else int(fields[19])
