"""Whose a checkpoint folder is: the newest attempt's, and nobody else may add to it or delete in it.

The driver of an attempt that was given up may live on, on a node that was cut off. Each attempt therefore saves into a
folder of its own, and a save that is through is moved from there to where checkpoints are looked for. An attempt that
begins takes the folders of all earlier ones away, so that what they still write leads nowhere.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from pathlib import Path

from verl_workflow.errors import ErrorCode, FencedError
from verl_workflow.training._discard import discard

_CLAIMS = "owners"
_SAVING = "saving-"
_OWNER = re.compile(r"(\d+)\.(\d+)")


class OvertakenError(FencedError):
    """A later attempt trains in this folder: this one must end."""


def owner_of(epoch: int, attempt: int) -> str:
    """How an attempt signs: by its driver's epoch and its own number."""
    return f"{epoch}.{attempt}"


def is_later(one: str, other: str) -> bool:
    """Whether the attempt that signs as `one` came after `other`; the empty signature is nobody's and before all."""
    return one != "" and (other == "" or _order(one) > _order(other))


def saving_folder(root: Path, owner: str) -> Path:
    """Where the attempt's verl writes, on the file system of `root`."""
    return root / f"{_SAVING}{owner}"


def half_saved(root: Path) -> list[Path]:
    """What attempts have begun to save and not brought to its end."""
    return [entry for folder in sorted(root.glob(f"{_SAVING}*")) for entry in _folders(folder)]


def claim(root: Path, owner: str) -> None:
    """Make the folder this attempt's; from then on no earlier one can bring a checkpoint into it.

    A claim is a file of its own, put there only if absent, and the latest epoch and attempt counts: whoever comes late
    with an old one takes nothing away. Claiming twice is as claiming once.

    Raises:
        OvertakenError: a later attempt has claimed it.
    """
    (root / _CLAIMS).mkdir(exist_ok=True)
    (root / _CLAIMS / owner).touch()
    require_owner(root, owner)
    for earlier in _owners(root)[:-1]:
        _close(saving_folder(root, earlier))


def require_owner(root: Path, owner: str) -> None:
    """Raise OvertakenError when a later attempt has claimed the folder."""
    latest = max([*_owners(root), owner], key=_order)
    if latest != owner:
        raise OvertakenError(
            ErrorCode.FENCED,
            f"attempt {latest} trains here now: this one, {owner}, has been overtaken and ends",
            where=str(root),
        )


def _folders(folder: Path) -> Iterator[Path]:
    if folder.is_dir():
        yield from (entry for entry in folder.iterdir() if entry.is_dir())


def _owners(root: Path) -> list[str]:
    """All that have claimed it, the latest one last."""
    try:
        names = [entry.name for entry in (root / _CLAIMS).iterdir() if _OWNER.fullmatch(entry.name)]
    except FileNotFoundError:
        return []
    return sorted(names, key=_order)


def _order(owner: str) -> tuple[int, int]:
    epoch, attempt = owner.split(".")
    return int(epoch), int(attempt)


def _close(folder: Path) -> None:
    """Take the folder away and leave a file in its place: nothing can be written below it, nor moved out of it."""
    while not folder.is_file():
        if folder.is_dir():
            discard(folder)
        with contextlib.suppress(FileExistsError):
            folder.touch(exist_ok=False)
