"""Files on a local disk that a power cut leaves whole or not at all."""

from __future__ import annotations

import os
import secrets
from pathlib import Path
from typing import BinaryIO


def write_durably(path: Path, data: bytes, *, replace: bool, root: Path) -> bool:
    """Write a file that is there, whole, after a power cut from when this returns; before, it is whole or not there.

    Its content is on the disk before it gets its name. `root` exists.

    Args:
        replace: what is there under its name; else that is left as it is.

    Returns:
        False when it was there, and is not to be replaced.
    """
    # A name that obstore takes for a file which is still being written, and so shows to nobody.
    partial = path.with_name(f"{path.name}#{secrets.randbits(60)}")
    try:
        with _opened(partial) as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        if replace:
            partial.replace(path)
        else:
            try:
                path.hardlink_to(partial)
            except FileExistsError:
                return False
    finally:
        partial.unlink(missing_ok=True)
    # All of them: another process may have made one, and not have flushed it yet.
    for folder in path.parents:
        if folder.is_relative_to(root.parent):
            flush_folder(folder)
    return True


def _opened(path: Path) -> BinaryIO:
    while True:
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            return path.open("xb")
        except FileNotFoundError:
            # Somebody has removed the folder, as it was empty.
            continue


def flush_folder(folder: Path) -> None:
    """Have the disk keep the names in a folder."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
