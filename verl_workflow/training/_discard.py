"""Deleting folders so that a kill in between leaves nothing under their names."""

from __future__ import annotations

import shutil
import time
from pathlib import Path

_DOOMED = "deleting-"


def discard(folder: Path) -> None:
    """Delete a folder; what of it cannot be deleted stays under another name until `finish_discarding`."""
    doomed = folder.with_name(f"{_DOOMED}{folder.name}-{time.time_ns()}")
    folder.rename(doomed)
    shutil.rmtree(doomed, ignore_errors=True)


def half_discarded(root: Path) -> list[Path]:
    """Folders in `root` whose deletion was begun and is not through."""
    return sorted(root.glob(f"{_DOOMED}*"))


def finish_discarding(root: Path) -> None:
    """Delete what a killed deletion has left in `root`."""
    for folder in half_discarded(root):
        shutil.rmtree(folder, ignore_errors=True)
