"""Files that grow, read line by line."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from verl_workflow.errors import ErrorCode, VerlWorkflowError

_BLOCK = 1 << 20


class Tail:
    """New whole lines of a text file since the last look, each exactly once.

    A last line without its line break is kept back until the rest of it comes, or until `ended` says that none will.
    Of a line that was redrawn with carriage returns (a progress bar), the last drawing is what counts.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._offset = 0
        self._rest = b""

    def lines(self, *, ended: bool = False) -> Iterator[str]:
        """What has been added; nothing while there is no such file, or something else in its place.

        Raises:
            VerlWorkflowError(STORAGE): the file cannot be read.
        """
        try:
            # Opening what is no file may fail, and opening a pipe waits for its other end.
            if not self.path.is_file():
                return
            stream = self.path.open("rb")
        except (FileNotFoundError, NotADirectoryError):
            return
        except OSError as error:
            raise VerlWorkflowError(
                ErrorCode.STORAGE,
                f"the log cannot be read: {error.strerror or error}",
                where=str(self.path),
                remedy="Check the permissions of the folder.",
            ) from error
        with stream:
            stream.seek(self._offset)
            while block := stream.read(_BLOCK):
                self._offset += len(block)
                *whole, self._rest = (self._rest + block).split(b"\n")
                yield from map(_text, whole)
        if ended and self._rest:
            rest, self._rest = self._rest, b""
            yield _text(rest)


def _text(line: bytes) -> str:
    return line.decode("utf-8", errors="replace").rstrip("\r").rpartition("\r")[2]
