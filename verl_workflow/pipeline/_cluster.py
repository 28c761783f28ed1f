"""The Ray cluster a run uses: the one named, or one of its own on this machine."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from verl_workflow.errors import ErrorCode, UserError, VerlWorkflowError

NAMESPACE = "verl_workflow"
# Logical CPUs of a local cluster: verl asks for 3 for each rank, 1 for TransferQueue's controller and 1 for each of
# its storage units, whatever the machine has; with fewer it would wait for ever on a laptop.
LOCAL_CPUS = 12
_LOCAL_STARTS = 3
_KNOCK_S = 10.0
_KEPT_S = 3 * 86400.0


def connect(address: str | None, *, code_dir: Path | None = None) -> bool:
    """Join the cluster at `address` or ``RAY_ADDRESS``, or start one that ends with this process.

    Args:
        address: ``host:port`` or ``ray://host:port``; None asks the environment.
        code_dir: travels to the workers as Ray's ``working_dir``.

    Returns:
        True when the cluster is this process's own.

    Raises:
        VerlWorkflowError(CLUSTER_UNREACHABLE): nothing answers at the address.
        UserError(DEPENDENCY_MISSING): Ray is not installed.
    """
    try:
        import ray
    except ImportError as error:
        raise UserError(
            ErrorCode.DEPENDENCY_MISSING,
            "running a pipeline needs Ray",
            remedy='Install it with: uv pip install "verl-workflow[ray,verl]".',
        ) from error

    from tenacity import Retrying, stop_after_attempt

    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    address = address or os.environ.get("RAY_ADDRESS") or None
    runtime_env = (
        {"working_dir": str(code_dir)}
        if code_dir is not None and code_dir.is_dir() and any(code_dir.iterdir())
        else None
    )
    local = address is None or address == "local"
    options: dict[str, Any] = {
        "namespace": NAMESPACE,
        "runtime_env": runtime_env,
        "log_to_driver": False,
        # Ray warns of many workers, which verl needs, in the middle of what the user reads.
        "logging_level": "error",
    }
    if local:
        folder = Path(tempfile.gettempdir()) / f"verl-workflow-ray-{os.getuid()}"
        _tidy(folder)
        options |= {
            "num_cpus": max(LOCAL_CPUS, os.cpu_count() or 1),
            "num_gpus": None if _has_gpu() else 1,
            "include_dashboard": False,
            "_temp_dir": str(folder),
        }
    else:
        check_answers(address)
    # Ray gives its own processes 30 seconds to start, which a busy machine exceeds now and then.
    starting = Retrying(stop=stop_after_attempt(_LOCAL_STARTS if local else 1), reraise=True)
    try:
        with _signal_handlers_kept():
            starting(ray.init, address="local" if local else address, **options)
    except Exception as error:
        first = next(iter(str(error).strip().splitlines()), type(error).__name__)
        raise VerlWorkflowError(
            ErrorCode.CLUSTER_UNREACHABLE,
            f"Ray could not be started on this machine: {first}" if local else f"the cluster cannot be joined: {first}",
            value=address,
            remedy="See whether the machine is overloaded or its disk full, and try again."
            if local
            else "Check the address and that the head node runs, or leave it out to start Ray on this machine.",
            retryable=True,
        ) from error
    return local


def _tidy(folder: Path) -> None:
    """Remove what Ray has left of old local clusters, half a megabyte each; who looks for a cause does so earlier."""
    for session in folder.glob("session_2*_*"):
        _, _, process = session.name.rpartition("_")
        with suppress(OSError):
            old = time.time() - session.stat().st_mtime > _KEPT_S
            if old and process.isdecimal() and not Path("/proc", process).exists():
                shutil.rmtree(session, ignore_errors=True)


def check_answers(address: str | None) -> None:
    """Raise VerlWorkflowError(CLUSTER_UNREACHABLE) unless something listens there: Ray itself tries for minutes.

    Args:
        address: as for `connect`; one that means this machine is not looked for.
    """
    address = address or os.environ.get("RAY_ADDRESS") or "local"
    host, colon, port = address.removeprefix("ray://").rpartition(":")
    if not colon or not port.isdecimal():
        return
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=_KNOCK_S).close()
    except (OSError, OverflowError) as error:
        raise VerlWorkflowError(
            ErrorCode.CLUSTER_UNREACHABLE,
            f"nothing answers there: {error}",
            where="--address",
            value=address,
            remedy="Check the address and that the head node runs, or leave it out to start Ray on this machine.",
            retryable=True,
        ) from error


@contextmanager
def _signal_handlers_kept() -> Iterator[None]:
    """Put back the caller's handlers: Ray sets its own, in C++ too, which print a stack trace and end the process."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT)}
    try:
        yield
    finally:
        for number, handler in before.items():
            # Where the caller had none, Ray's ends the cluster before the process.
            if handler not in {signal.SIG_DFL, None}:
                signal.signal(number, handler)


def _has_gpu() -> bool:
    return Path("/dev/nvidiactl").exists() or Path("/dev/kfd").exists()
