"""Run ids that are safe as folder names, and who owns a run."""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from verl_workflow.errors import ErrorCode, UserError

_RUN_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")


def check_run_id(run_id: str) -> str:
    """`run_id` itself. Raises UserError(RUN_ID_INVALID) when it could leave its folder or is not portable."""
    if not _RUN_ID.fullmatch(run_id) or ".." in run_id:
        raise UserError(
            ErrorCode.RUN_ID_INVALID,
            "this is no usable run id",
            value=run_id,
            remedy="Use 1 to 100 letters, digits, '.', '_' and '-', beginning with a letter or digit, without '..'.",
        )
    return run_id


def this_process() -> dict[str, Any]:
    """Who this process is, well enough to see from its host whether it still lives."""
    return {"host": socket.gethostname(), "boot": _boot_id(), "pid": os.getpid(), "started": _started(os.getpid())}


def is_dead(owner: Mapping[str, Any]) -> bool:
    """True when the owner is known to be gone: it was on this host, since this boot, and its process no longer is."""
    if owner.get("host") != socket.gethostname():
        return False
    if owner.get("boot") != _boot_id():
        return True
    return _started(int(owner["pid"])) != owner.get("started")


def _boot_id() -> str:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


def _started(pid: int) -> float | None:
    import psutil

    try:
        process = psutil.Process(pid)
        return None if process.status() == psutil.STATUS_ZOMBIE else process.create_time()
    except psutil.NoSuchProcess:
        return None
