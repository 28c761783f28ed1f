"""Pipelines written in Python."""

from __future__ import annotations

import traceback
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from verl_workflow.errors import ErrorCode, UserError, UserErrors
from verl_workflow.paths import absolute
from verl_workflow.spec._model import Pipeline
from verl_workflow.spec._words import did_you_mean, label

_VARIABLE = "pipeline"


def is_python(path: str) -> bool:
    """Whether a path names a Python file or a variable in one (``file.py:variable``)."""
    file, _, variable = path.rpartition(":")
    return path.endswith(".py") or (file.endswith(".py") and variable.isidentifier())


def pipeline_from_python(path: str) -> tuple[Path, Pipeline]:
    """Run a Python file and take the pipeline it defines.

    Args:
        path: ``file.py`` with a variable `pipeline`, or ``file.py:variable``.

    Returns:
        The file and its pipeline, params not yet substituted.

    Raises:
        UserError: FILE_MISSING; SPEC_INVALID when the file raises or has no such variable, with the line.
        UserErrors: mistakes in the fields of its classes.
    """
    from verl_workflow.code import load_module

    if path.endswith(".py"):
        file, variable = Path(path), _VARIABLE
    else:
        name, _, variable = path.rpartition(":")
        file = Path(name)
    if not absolute(file).is_file():
        raise UserError(
            ErrorCode.FILE_MISSING,
            "the pipeline file does not exist",
            where=str(file),
            remedy="Check the path (`verl-workflow init` makes a pipeline to start from).",
        )
    try:
        module = load_module(file, file.parent)
    except ValidationError as error:
        raise UserErrors(_mistakes(error, file)) from error
    except UserError:
        raise
    except (Exception, SystemExit) as error:
        where = _line(error, file)
        raise UserError(
            ErrorCode.SPEC_INVALID,
            f"the pipeline file raised {type(error).__name__}: {error}",
            where=where,
            remedy="Mend the file; it has to import without side effects.",
        ) from error
    found = vars(module).get(variable)
    if not isinstance(found, Pipeline):
        pipelines = [name for name, value in vars(module).items() if isinstance(value, Pipeline)]
        other = f"Name one of these: {', '.join(f'{file}:{name}' for name in pipelines)}." if pipelines else ""
        remedy = other or f"Write `{variable} = Pipeline(...)` at its top level."
        what = f"the file has no Pipeline in a variable {variable!r}"
        hint = did_you_mean(variable, pipelines)
        raise UserError(ErrorCode.SPEC_INVALID, what, where=str(file), value=found, remedy=hint + remedy)
    return file, found


def _mistakes(error: ValidationError, file: Path) -> list[UserError]:
    where = _line(error, file)
    return [
        UserError(
            ErrorCode.SPEC_INVALID,
            f"{error.title}.{label(detail['loc'])}: {detail['msg'][:1].lower()}{detail['msg'][1:]}".replace(
                ".: ", ": "
            ),
            where=where,
            value=None if detail["type"] == "missing" else detail["input"],
            remedy=_hint(error.title, detail),
        )
        for detail in error.errors(include_url=False)
    ]


def _hint(title: str, detail: Any) -> str:
    """The nearest right spelling of a field that a class does not have."""
    from verl_workflow import spec

    known = getattr(spec, title, None)
    if detail["type"] != "extra_forbidden" or len(detail["loc"]) != 1 or known is None:
        return ""
    fields = sorted(known.model_fields)
    return did_you_mean(detail["loc"][0], fields) or f"Known: {', '.join(fields)}."


def _line(error: BaseException, file: Path) -> str:
    if isinstance(error, SyntaxError) and error.filename == str(file.absolute()):
        return f"{file}:{error.lineno}:{error.offset}"
    lines = [
        frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == str(file.absolute())
    ]
    return f"{file}:{lines[-1]}" if lines else str(file)
