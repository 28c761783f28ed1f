"""Ids of runs and names of steps: any Unicode text, and the file names that stand for them."""

from __future__ import annotations

import functools
import hashlib
import re
import secrets
import string
from dataclasses import dataclass

from verl_workflow.errors import ErrorCode, UserError

LONGEST = 200
_PLAIN = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]*")
_SAFE = frozenset(string.ascii_letters + string.digits + "_-")
_LONGEST_PART = 150


@functools.lru_cache(maxsize=1024)
def path_part(text: str) -> str:
    """The one file name for a text: itself when it is plain, else with ``=`` and two hexadecimal digits a byte.

    Two texts never share one: ``=`` itself is escaped, and what would be too long for a file system ends in its digest.
    """
    text = str.__str__(text)
    if len(text) <= _LONGEST_PART and ".." not in text and _PLAIN.fullmatch(text):
        return text
    safe = "".join(chr(byte) if chr(byte) in _SAFE else f"={byte:02X}" for byte in text.encode())
    if len(safe) <= _LONGEST_PART:
        return safe
    return f"{safe[: _LONGEST_PART - 67]}=={hashlib.sha256(text.encode()).hexdigest()}"


def check_name(text: object, what: str, code: ErrorCode) -> str:
    """The text, as a plain `str`.

    Raises:
        UserError: it cannot name a `what`: it is not 1 to 200 characters of Unicode, or is ``.`` or ``..``.
    """
    if not isinstance(text, str):
        raise TypeError(f"{what} has to be a string type.")
    wrong = (
        "it is empty"
        if not text
        else f"it has {len(text)} characters, more than {LONGEST}"
        if len(text) > LONGEST
        else "it means a folder"
        if text in {".", ".."}
        else "it holds a NUL or half of a surrogate pair"
        if "\0" in text or re.search("[\ud800-\udfff]", text)
        else ""
    )
    if wrong:
        raise UserError(
            code,
            f"this cannot be the {what}: {wrong}",
            value=text,
            remedy=f"Use 1 to {LONGEST} characters, not . or .. alone.",
        )
    # An Enum's member may be a `str`, and would be written out by its own name.
    return str.__str__(text)


def is_name(text: object) -> bool:
    """Whether a record may hold this name."""
    return isinstance(text, str) and 0 < len(text) <= 2 * LONGEST


def is_key(text: str) -> bool:
    """Whether this can be the place of a file in a storage."""
    return not {"", ".", ".."} & set(text.split("/"))


def run_folder(run_id: str) -> str:
    """Where the runs of an id lie in their storage: the one that its definition names, and remains of deleted ones."""
    return f"runs/{path_part(run_id)}"


@dataclass(frozen=True, kw_only=True)
class RunKey:
    """One run for good, whereas its id may be given again once it is deleted.

    All that a run writes lies in a folder of its own. So nothing of a deleted one, be it a file that is left or a
    driver that has slept through it all, can get among the files of the next.

    Attributes:
        incarnation: 16 hexadecimal digits, of this run alone.
    """

    run_id: str
    incarnation: str

    @classmethod
    def new(cls, run_id: str) -> RunKey:
        """A key that no run has."""
        return cls(run_id=run_id, incarnation=secrets.token_hex(8))

    @property
    def folder(self) -> str:
        """Where its records lie in the storage."""
        return f"{run_folder(self.run_id)}/{self.incarnation}"


def is_incarnation(text: object) -> bool:
    """Whether this can be a `RunKey.incarnation`."""
    return isinstance(text, str) and re.fullmatch("[0-9a-f]{16}", text) is not None
