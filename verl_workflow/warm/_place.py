"""Where a node's warm server is found, and that it is ours and fits what we would start ourselves."""

from __future__ import annotations

import hashlib
import importlib.metadata
import importlib.util
import os
import stat
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

SOCKET = "socket"
# Variable that names the process with which a forked one ends; the stub knows it, too.
SUPERVISOR = "VERL_WORKFLOW_SUPERVISOR"
STUB = Path(__file__).with_name("_stub.py")
# Read when a module that is preloaded is imported: a server that was started with others is of no use.
_AT_IMPORT = ("CUDA_", "GOMP_", "HF_", "KMP_", "MKL_", "NUMEXPR_", "OMP_", "OPENBLAS_", "PYTHON", "TOKENIZERS_")
_AT_IMPORT_MORE = ("LD_LIBRARY_PATH", "LD_PRELOAD", "TORCH_LOGS", "TRANSFORMERS_OFFLINE", "TRITON_CACHE_DIR")
_PACKAGES = ("datasets", "numpy", "pandas", "pyarrow", "ray", "tensordict", "torch", "transformers", "verl")
# Set anew in each process that is forked; and that Ray sets in its workers alone.
_NOT_OF_IT = frozenset(
    {"CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS", "PYTHONBREAKPOINT", "PYTHONPATH", "PYTHONUNBUFFERED"}
)


def folder_of_server() -> Path:
    """Of the server that fits this process, with the same interpreter, packages and environment; private to the user.

    Raises PermissionError when somebody else has made it.
    """
    mine = Path(tempfile.gettempdir()) / f"verl-workflow-warm-{os.getuid()}"
    folder = mine / _digest()
    for each in (mine, folder):
        each.mkdir(mode=0o700, exist_ok=True)
        found = each.lstat()
        if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
            raise PermissionError(f"{each} is not private to this user: remove it")
    return folder


def python_command(folder: Path) -> str:
    """What Ray is given in place of ``python`` for its workers: as that, but forked from the server if there is one."""
    return f"{sys.executable} -S -E {STUB} {folder / SOCKET}"


def forked_for(command: Sequence[str], pid: int) -> int | None:
    """Pid of the process that the stub `pid`, of this command line, stands in for; None when it is no stub's, or has
    become plain Python.

    A forked process shows the variables and the command line of its server, and cannot be told by them.
    """
    if str(STUB) not in command:
        return None
    place = Path(command[list(command).index(str(STUB)) + 1])
    try:
        return int(forked_note(place.parent, pid).read_text(encoding="utf-8"))
    except (FileNotFoundError, ValueError):
        return None


def forked_note(folder: Path, stub: int) -> Path:
    """File in which a server's folder names the process that it has forked for a stub."""
    return folder / "forked" / str(stub)


def _digest() -> str:
    parts = [sys.executable, sys.version]
    parts += [f"{name}={value}" for name, value in sorted(os.environ.items()) if _matters(name)]
    parts += [f"{name}=={_version(name)} {_origin(name)}" for name in _PACKAGES]
    code = Path(__file__).parent
    parts += [f"{file.name}:{file.stat().st_mtime_ns}" for file in sorted(code.glob("*.py"))]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _origin(package: str) -> str | None:
    """Where it would be imported from: the paths for that differ between a driver and Ray's workers."""
    found = sys.modules[package].__spec__ if package in sys.modules else importlib.util.find_spec(package)
    return found.origin if found is not None else None


def _matters(name: str) -> bool:
    return name not in _NOT_OF_IT and (name.startswith(_AT_IMPORT) or name in _AT_IMPORT_MORE)
