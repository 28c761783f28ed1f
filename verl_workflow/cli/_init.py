"""`init`: a pipeline to start from."""

from __future__ import annotations

import shlex
from importlib.resources import files
from pathlib import Path
from typing import Annotated

import typer

from verl_workflow.cli import _options
from verl_workflow.cli._output import print_json, print_line, reported
from verl_workflow.errors import ErrorCode, UserError, UserErrors

FILES = ("pipeline.yaml", "reward.py", "questions.jsonl")


def init(
    folder: Annotated[Path, typer.Argument(metavar="[DIR]", help="Where to write.", show_default=False)] = Path(),
    as_json: _options.Json = False,
) -> None:
    """Write a starter pipeline: a small model, a reward and questions, ready to run without a GPU."""
    with reported(as_json):
        written = write_starter(folder)
        if as_json:
            print_json({"folder": str(folder.absolute()), "files": [path.name for path in written]})
            return
        for path in written:
            print_line(f"wrote {path}")
        print_line(f"next: cd {shlex.quote(str(folder))} && verl-workflow run {FILES[0]}")


def write_starter(folder: Path) -> list[Path]:
    """Write the starter files into `folder`, which is created; none is written when one of them is there.

    Raises:
        UserErrors(FILE_EXISTS): files that would be overwritten.
        UserError(STORAGE): the folder cannot be written.
    """
    there = [folder / name for name in FILES if (folder / name).exists()]
    if there:
        raise UserErrors(
            [
                UserError(
                    ErrorCode.FILE_EXISTS,
                    "the file exists and is left as it is",
                    where=str(path),
                    remedy="Choose another folder: verl-workflow init DIR.",
                )
                for path in there
            ]
        )
    starter = files("verl_workflow.cli") / "starter"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name in FILES:
            with (folder / name).open("x", encoding="utf-8") as stream:
                stream.write((starter / name).read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(
            ErrorCode.STORAGE,
            f"the starter cannot be written: {error.strerror or error}",
            where=str(error.filename or folder),
            remedy="Choose a folder that you may write to.",
        ) from error
    return [folder / name for name in FILES]
