"""Paths written in a pipeline: where they lead, seen from the folder of its file."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from verl_workflow.paths import absolute, unreadable


def located(base_dir: Path, text: str, where: str = "") -> Path:
    """The absolute path of what a user wrote, ``~`` put in; nothing need be there.

    Raises:
        UserError(FILE_MISSING): the file system cannot even look for such a path.
    """
    path = absolute(text, base=base_dir, home=True, where=where)
    try:
        path.exists()
    except OSError as error:
        raise unreadable(text, error, where=where) from error
    return path


def matches(base_dir: Path, pattern: str, where: str = "") -> Iterator[Path]:
    """The files behind a path or a glob, in no order; nothing when there are none.

    Raises:
        UserError(FILE_MISSING): it is no glob, or a path that cannot be looked for.
    """
    path = located(base_dir, pattern, where)
    if path.is_file():
        yield path
        return
    inside = path.relative_to(path.anchor)
    try:
        # Of no parts when it is the root itself, which `glob` refuses.
        found = Path(path.anchor).glob(str(inside)) if inside.parts else iter(())
        yield from (match for match in found if match.is_file())
    except (OSError, ValueError) as error:
        raise unreadable(pattern, error, where=where) from error
