"""What every command does alike: exit codes, errors as lines or JSON, one document on stdout."""

from __future__ import annotations

import enum
import errno
import io
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TextIO

import typer

from verl_workflow.cli._json import json_parts
from verl_workflow.errors import ErrorCode, UserError, UserErrors, VerlWorkflowError

if TYPE_CHECKING:
    from rich.console import RenderableType


class ExitCode(enum.IntEnum):
    """What the command line returns; scripts may rely on it."""

    OK = 0
    FAILED = 1
    USER_ERROR = 2
    CANCELLED = 3
    INTERRUPTED = 130
    TERMINATED = 143


# What typer raises for wrong arguments; it names this base of its public errors nowhere.
_UsageError: Any = typer.BadParameter.__base__


@contextmanager
def reported(as_json: bool) -> Iterator[None]:
    """Turn errors raised on purpose into their messages and exit codes; any other exception passes, traceback and all.

    With `as_json` the error is the document on stdout, ``{"error": ...}``; the lines for people go to stderr always.
    """
    try:
        yield
    except VerlWorkflowError as error:
        for each in flat(error):
            note(f"error: {each}")
        if as_json:
            print_json({"error": error.to_json()})
        code = ExitCode.USER_ERROR if isinstance(error, UserError) else ExitCode.FAILED
        raise typer.Exit(code) from error
    except KeyboardInterrupt as stop:
        raise typer.Exit(ExitCode.INTERRUPTED) from stop


@contextmanager
def usage_errors(as_json: bool) -> Iterator[None]:
    """Print wrong arguments as the document on stdout with `as_json`; they pass, for typer tells them on stderr."""
    try:
        yield
    except _UsageError as error:
        if as_json:
            command = error.ctx.command_path if error.ctx is not None else "verl-workflow"
            found = UserError(
                ErrorCode.USAGE_INVALID,
                error.format_message().rstrip("."),
                where=command,
                remedy=f"See {command} --help.",
            )
            print_json({"error": found.to_json()})
        raise


class _OutputError(OSError):
    """Stdout cannot take what is printed."""


class _Stdout(io.FileIO):
    """The process's stdout, whose errors can be told from those of other files."""

    def write(self, data: Any) -> int:
        try:
            return super().write(data)
        except OSError as error:
            # What could not be written waits in buffers yet, and must not fail a second time at the process's end.
            os.dup2(os.open(os.devnull, os.O_WRONLY), self.fileno())
            raise _OutputError(error.errno, error.strerror) from error


@contextmanager
def checked_stdout() -> Iterator[None]:
    """Exit with 1 when stdout cannot take all that is printed: silently when its reader has gone, else with the reason.

    Any other `OSError` passes.
    """
    before = sys.stdout
    if before is None:
        yield
        return
    before.flush()
    buffer = io.BufferedWriter(_Stdout(before.fileno(), "wb", closefd=False))
    sys.stdout = io.TextIOWrapper(
        buffer, encoding=before.encoding, errors=before.errors, line_buffering=before.isatty()
    )
    try:
        try:
            yield
        finally:
            sys.stdout.flush()
    except _OutputError as error:
        if error.errno != errno.EPIPE:
            note(f"error: cannot write to standard output: {error.strerror}")
        raise SystemExit(ExitCode.FAILED) from error


def flat(error: VerlWorkflowError) -> list[VerlWorkflowError]:
    """The single mistakes behind an error."""
    if isinstance(error, UserErrors):
        return [single for each in error.errors for single in flat(each)]
    return [error]


def print_json(document: Any) -> None:
    """Print one JSON document to stdout, however deeply nested; numbers that JSON cannot hold become null."""
    print_line("".join(json_parts(document, indent="  ", encoding=_encoding(sys.stdout))))


def print_line(text: str) -> None:
    """Print to stdout what the user asked for; characters that it cannot take are written as escapes."""
    typer.echo(_encodable(text, sys.stdout))


def note(text: str) -> None:
    """Print to stderr: errors, warnings and progress, which are never part of the result."""
    typer.echo(_encodable(text, sys.stderr), err=True)


def interactive() -> bool:
    """Whether stderr, where live views are drawn, is a terminal that can redraw."""
    return sys.stderr.isatty() and os.environ.get("TERM") != "dumb"


def print_table(renderable: RenderableType) -> None:
    """Print a table to stdout: fitted to a terminal, and never cut or wrapped on a pipe."""
    from rich.console import Console

    wide = None if sys.stdout.isatty() else 10_000
    # What runs and stages say is shown as it is: brackets and colons in it are no markup.
    console = Console(file=sys.stdout, width=wide, highlight=False, markup=False, emoji=False)
    with console.capture() as captured:
        console.print(renderable)
    # Padding to the full width is of use to nobody.
    for line in captured.get().splitlines():
        print_line(line.rstrip())


def _encodable(text: str, stream: TextIO) -> str:
    """`text` with escapes for what the stream's encoding lacks, such as the halves of a surrogate pair."""
    encoding = _encoding(stream)
    return text.encode(encoding, "backslashreplace").decode(encoding)


def _encoding(stream: TextIO) -> str:
    return stream.encoding or "utf-8"
