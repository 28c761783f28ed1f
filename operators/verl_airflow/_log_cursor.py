"""A job's log, read again and again from its beginning, told line by line and once each."""

from __future__ import annotations


class LogCursor:
    """Where the reader of a growing log stands.

    Args:
        offset: characters that have been told already, as `offset` of an earlier cursor says.
    """

    def __init__(self, offset: int = 0) -> None:
        self.offset = offset

    def advance(self, text: str, *, ended: bool = False) -> list[str]:
        """The lines that have been completed since the last call, without their ends.

        Args:
            text: the whole log so far. A shorter one than before tells nothing: its node is gone.
            ended: nothing will follow, so that the last line is told even if it has no end.
        """
        new = text[self.offset :]
        whole = len(new) if ended else new.rfind("\n") + 1
        self.offset += whole
        # Not splitlines: it also breaks at characters that are part of a line.
        lines = new[:whole].split("\n")
        return lines[:-1] if lines[-1] == "" else lines
