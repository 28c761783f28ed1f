"""Paths as users write them, and what the file system says to them: every refusal is an error with its place."""

from __future__ import annotations

import errno
import os
import re
from pathlib import Path

from verl_workflow.errors import ErrorCode, UserError, VerlWorkflowError

# What no later attempt mends: the path is of the wrong kind, or not ours to write.
_PERMANENT = frozenset(
    {
        errno.EACCES, errno.EEXIST, errno.EISDIR, errno.ELOOP, errno.ENAMETOOLONG, errno.ENOENT, errno.ENOTDIR,
        errno.EPERM, errno.EROFS,
    }
)  # fmt: skip

# Bytes that are not UTF-8 come as lone surrogates; neither can be written to a run's records.
_NO_TEXT = re.compile("[\0\ud800-\udfff]")


def absolute(
    path: str | os.PathLike[str],
    *,
    base: str | os.PathLike[str] = "",
    home: bool = False,
    code: ErrorCode = ErrorCode.FILE_MISSING,
    where: str = "",
) -> Path:
    """`path` against `base`, and that against the working directory; nothing is resolved or looked for.

    Args:
        home: whether a leading ``~`` means a home folder. code: of the errors.

    Raises:
        UserError: no file can have such a path, there is no such home, or the working directory is gone.
    """
    text = os.fspath(path)
    try:
        full = Path(base, Path(text).expanduser() if home else text)
    except RuntimeError as error:
        raise UserError(
            code,
            "there is no such home folder",
            where=where,
            value=text,
            remedy="Write the whole path, or ./ in front of a name that begins with ~.",
        ) from error
    if _NO_TEXT.search(text):
        what = "a path holds no NUL and nothing that is not UTF-8"
        raise UserError(code, what, where=where, value=text, remedy="Use another name.")
    try:
        return full.absolute()
    except FileNotFoundError as error:
        raise UserError(
            code,
            "the working directory does not exist any more, and a relative path starts at it",
            where=where,
            value=text,
            remedy="Change to a folder that exists, or write absolute paths.",
        ) from error


def unreadable(path: str | os.PathLike[str], error: Exception, *, where: str = "") -> UserError:
    """The error for a path that the file system will not even look for: too long, in a closed folder, a bad pattern."""
    reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    return UserError(
        ErrorCode.FILE_MISSING,
        f"the path cannot be looked for: {reason[:1].lower()}{reason[1:]}",
        where=where,
        value=os.fspath(path),
        remedy="Write the path of a file or folder that this user may read.",
    )


def refused(path: str | os.PathLike[str], error: OSError) -> VerlWorkflowError:
    """The STORAGE error for a file or folder that cannot be made; a `UserError` unless it may work later as it is."""
    what = f"the file system refuses this path: {error.strerror or error}"
    where = error.filename if isinstance(error.filename, str) else os.fspath(path)
    if error.errno in _PERMANENT:
        remedy = "Name a folder that can be made and written to."
        return UserError(ErrorCode.STORAGE, what, where=where, remedy=remedy)
    remedy = "Check that the storage is reachable, writable and not full."
    return VerlWorkflowError(ErrorCode.STORAGE, what, where=where, remedy=remedy, retryable=True)
