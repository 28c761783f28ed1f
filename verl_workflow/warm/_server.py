"""``python -m verl_workflow.warm._server <folder>``: has imported what takes long, and forks processes from that.

It imports neither ray nor verl: Ray's library reads the environment of the worker that it will be when it is loaded,
and verl loads Ray. It has no thread, and CUDA is untouched, so that a fork is as good as a fresh process.
"""

from __future__ import annotations

import ctypes
import fcntl
import gc
import importlib
import json
import os
import random
import runpy
import selectors
import shutil
import signal
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from verl_workflow.warm._place import SOCKET, forked_note

# What most of the time of `import verl` and of the first model goes into, and what needs neither Ray nor verl.
MODULES = (
    *("torch", "torch._dynamo", "torch.distributed.fsdp", "torch.distributed.checkpoint", "tensordict"),
    *("transformers", "transformers.models.auto.modeling_auto", "transformers.models.qwen2.modeling_qwen2"),
    *("transformers.models.llama.modeling_llama", "transformers.generation.utils", "datasets", "pandas"),
    *("pyarrow.parquet", "omegaconf", "hydra", "aiohttp", "fastapi", "uvicorn", "peft", "accelerate"),
    *("torchdata.stateful_dataloader", "codetiming", "orjson", "msgspec", "zmq", "sympy"),
)
_FORBIDDEN = ("ray", "verl")
IDLE_SECONDS = 900.0
_LOOK_SECONDS = 1.0
_PR_SET_PDEATHSIG = 1
_LIBC = ctypes.CDLL(None, use_errno=True)


@dataclass(kw_only=True)
class _Child:
    """A process that was forked for a stub, and the file that says so."""

    pid: int
    note: Path
    connection: socket.socket
    handle: int


def main(folder: Path, modules: tuple[str, ...] = MODULES, idle_seconds: float = IDLE_SECONDS) -> None:
    """Serve until nobody has had a process for `idle_seconds`; at once when another server is there."""
    lock = (folder / "lock").open("w")
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return
    for name in modules:
        try:
            importlib.import_module(name)
        except Exception as error:  # noqa: BLE001 - what is not installed, or not here, is imported by whoever needs it
            print(f"{name} is not preloaded: {error}", file=sys.stderr)
    loaded = [name for name in _FORBIDDEN if name in sys.modules]
    threads = len(list(Path("/proc/self/task").iterdir()))
    if loaded or threads > 1 or threading.active_count() > 1:
        print(f"a fork would not be as good as a fresh process: {loaded}, {threads} threads", file=sys.stderr)
        return
    work = _serve(folder / SOCKET, idle_seconds)
    if work is not None:
        # In the child: nothing of the server's stays open.
        lock.close()
        work()


def _serve(place: Path, idle_seconds: float) -> Callable[[], None] | None:
    """None when it has ended; in a forked child, what that has to do."""
    place.unlink(missing_ok=True)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    partial = place.with_name(f"{SOCKET}.partial")
    partial.unlink(missing_ok=True)
    # By way of a handle: a socket's path may be 107 bytes long.
    handle = os.open(place.parent, os.O_RDONLY)
    listener.bind(f"/proc/self/fd/{handle}/{partial.name}")
    os.close(handle)
    # Of a server that was killed.
    shutil.rmtree(notes := forked_note(place.parent, 0).parent, ignore_errors=True)
    notes.mkdir()
    listener.listen(64)
    # There only when it answers.
    partial.rename(place)
    gc.collect()
    gc.freeze()
    selector = selectors.DefaultSelector()
    selector.register(listener, selectors.EVENT_READ)
    children: dict[int, _Child] = {}
    busy = time.monotonic()
    while children or time.monotonic() - busy < idle_seconds:
        for key, _ in selector.select(_LOOK_SECONDS):
            busy = time.monotonic()
            if key.fileobj is listener:
                work = _accept(place.parent, listener, selector, children)
                if work is not None:
                    return work
            elif isinstance(key.fileobj, int):
                _reap(children.pop(key.data), selector)
            elif key.data in children:
                _hear(children[key.data], selector)
    place.unlink(missing_ok=True)
    return None


def _accept(
    folder: Path, listener: socket.socket, selector: selectors.BaseSelector, children: dict[int, _Child]
) -> Callable[[], None] | None:
    connection, _ = listener.accept()
    connection.settimeout(10)
    try:
        head, streams, _, _ = socket.recv_fds(connection, 8, 3)
        size = int.from_bytes(head, "big")
        block = b""
        while len(block) < size:
            more = connection.recv(size - len(block))
            if not more:
                raise ConnectionError("cut off")
            block += more
        request = json.loads(block)
        assert len(streams) == 3
    except (OSError, ValueError, AssertionError):
        connection.close()
        return None
    server = os.getpid()
    pid = os.fork()
    if pid == 0:
        selector.close()
        listener.close()
        connection.close()
        for child in children.values():
            child.connection.close()
            os.close(child.handle)
        return lambda: _become(request, streams, server)
    for stream in streams:
        os.close(stream)
    connection.settimeout(None)
    stub, _, _ = struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    note = forked_note(folder, stub)
    note.write_text(str(pid), encoding="utf-8")
    child = _Child(pid=pid, note=note, connection=connection, handle=os.pidfd_open(pid))
    children[pid] = child
    selector.register(child.handle, selectors.EVENT_READ, pid)
    selector.register(connection, selectors.EVENT_READ, pid)
    _tell(child, {"pid": pid})
    return None


def _hear(child: _Child, selector: selectors.BaseSelector) -> None:
    """What its stub says: to end, or nothing any more."""
    try:
        said = child.connection.recv(16)
    except OSError:
        said = b""
    _signal_group(child.pid, signal.SIGTERM if said else signal.SIGKILL)
    if not said:
        selector.unregister(child.connection)


def _reap(child: _Child, selector: selectors.BaseSelector) -> None:
    _, status = os.waitpid(child.pid, 0)
    # What it has started is of its group, unless it went its own way.
    _signal_group(child.pid, signal.SIGKILL)
    child.note.unlink(missing_ok=True)
    selector.unregister(child.handle)
    os.close(child.handle)
    if child.connection in {key.fileobj for key in selector.get_map().values()}:
        selector.unregister(child.connection)
    _tell(child, {"exit": status})
    child.connection.close()


def _tell(child: _Child, what: dict[str, Any]) -> None:
    try:
        child.connection.sendall(json.dumps(what).encode() + b"\n")
    except OSError:
        # Its stub is gone, which is heard of in its turn.
        return


def _signal_group(pid: int, number: int) -> None:
    try:
        os.killpg(pid, number)
    except (ProcessLookupError, PermissionError):
        return


def _become(request: dict[str, Any], streams: list[int], server: int) -> None:
    """The process that was asked for, from here on."""
    os.setsid()
    _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != server:
        os._exit(1)
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
        os.close(stream)
    for stream_object in (sys.stdout, sys.stderr):
        stream_object.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    environment = request["environment"]
    os.environ.clear()
    os.environ.update(environment)
    os.environ["VERL_WORKFLOW_FORKED_BY"] = str(server)
    os.chdir(request["folder"])
    random.seed()
    if (torch := sys.modules.get("torch")) is not None:
        # Its OpenMP has read the server's variable.
        torch.set_num_threads(int(environment.get("OMP_NUM_THREADS") or len(os.sched_getaffinity(0))))
    _run(request["arguments"])


def _run(arguments: list[str]) -> None:
    """As ``python <arguments>``, of which ``-m module``, ``-u`` and a script are known."""
    words = [word for word in arguments if word != "-u"]
    inherited = [entry for entry in os.environ.get("PYTHONPATH", "").split(os.pathsep) if entry]
    own = [entry for entry in sys.path if entry not in ("", str(Path.cwd()))]
    if words[0] == "-m":
        module, rest = words[1], words[2:]
        sys.argv = [module, *rest]
        sys.path[:] = [str(Path.cwd()), *inherited, *own]
        runpy.run_module(module, run_name="__main__", alter_sys=True)
        return
    sys.argv = words
    sys.path[:] = [str(Path(words[0]).parent), *inherited, *own]
    runpy.run_path(words[0], run_name="__main__")


if __name__ == "__main__":
    if os.fork():
        # Whoever starts it waits for this, and owns no child then.
        os._exit(0)
    main(Path(sys.argv[1]))
