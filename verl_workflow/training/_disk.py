"""Room for the next checkpoint, looked for before verl begins to write it: a half-written one costs the whole night."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path

from verl_workflow.training._checkpoints import checkpoints, make_room, size_of

_FULL = 1 << 20


def full(folder: Path) -> str | None:
    """That nothing can be written in the folder any more, or None. Then logs and results lack what they would say."""
    free = shutil.disk_usage(folder).free
    return f"the disk of {folder} is full: {free} bytes are free" if free < _FULL else None


@dataclass(kw_only=True)
class DiskWatch:
    """Looks after each step before a save.

    Attributes:
        root: where checkpoints are written. every: steps between saves. total: the last step, which is always saved.
    """

    root: Path
    every: int
    total: int
    _looked: int = 0

    def short_of(self, step: int) -> str | None:
        """What is missing for the save that follows the step `step`, or None.

        A checkpoint takes as much as the newest one that is whole; before the first nothing is known. What is set
        aside or half deleted is given up for it first.
        """
        following = step + 1
        if step == self._looked or (following % self.every and following != self.total):
            return None
        self._looked = step
        there = checkpoints(self.root)
        if not there or there[-1].step == following:
            return None
        need = size_of(there[-1].path)
        if self._free() < need:
            make_room(self.root)
        free = self._free()
        if free >= need:
            return None
        return f"the next checkpoint needs {need / 1e9:.2f} GB and the disk of {self.root} has {free / 1e9:.2f} GB free"

    def _free(self) -> int:
        return shutil.disk_usage(self.root).free
