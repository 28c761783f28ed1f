"""Options that several commands share."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from verl_workflow.errors import ErrorCode, UserError, UserErrors

STORAGE_VARIABLE = "VERL_WORKFLOW_STORAGE"
DEFAULT_STORAGE = ".verl-workflow"

_FILE = "Pipeline file: YAML, or Python with a Pipeline in the variable `pipeline`."
PipelineFile = Annotated[Path, typer.Argument(metavar="FILE", help=_FILE, show_default=False)]
RunId = Annotated[str, typer.Argument(metavar="RUN", help="Id of the run.", show_default=False)]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON document to stdout, for programs.")]
Params = Annotated[
    list[str] | None,
    typer.Option("--param", "-p", metavar="NAME=VALUE", help="Value of a parameter; may be repeated."),
]
Storage = Annotated[
    str | None,
    typer.Option(
        "--storage",
        metavar="URI",
        help=f"Where runs are kept: a folder, s3://, gs:// or az://.  [default: ${STORAGE_VARIABLE}, "
        f"then {DEFAULT_STORAGE}]",
        show_default=False,
    ),
]
PipelineStorage = Annotated[
    str | None,
    typer.Option(
        "--storage",
        metavar="URI",
        help=f"Where runs are kept: a folder, s3://, gs:// or az://.  [default: ${STORAGE_VARIABLE}, then what the "
        f"pipeline says, then {DEFAULT_STORAGE}]",
        show_default=False,
    ),
]
Address = Annotated[
    str | None,
    typer.Option(
        "--address",
        metavar="HOST:PORT",
        help="Ray cluster to use.  [default: $RAY_ADDRESS, else Ray is started on this machine]",
        show_default=False,
    ),
]


def storage_of(option: str | None) -> str:
    """The storage a run is looked for in."""
    return pipeline_storage_of(option) or DEFAULT_STORAGE


def pipeline_storage_of(option: str | None) -> str | None:
    """The storage asked for, or None to leave it to the pipeline."""
    return option or os.environ.get(STORAGE_VARIABLE) or None


def cluster_of(option: str | None) -> str | None:
    """The address of the cluster to join, or None when Ray is to be started on this machine."""
    address = option or os.environ.get("RAY_ADDRESS") or None
    return None if address == "local" else address


def params_of(texts: Sequence[str] | None) -> dict[str, str]:
    """``name=value`` pairs as a mapping.

    Raises:
        UserErrors(PARAM_INVALID): a pair has no name or no ``=``, or a name is given twice.
    """
    found: dict[str, str] = {}
    errors: list[UserError] = []
    for text in texts or ():
        name, equals, value = text.partition("=")
        if not equals or not name.strip():
            errors.append(_wrong("is not NAME=VALUE", text, "Write it as -p steps=20."))
        elif name.strip() in found:
            errors.append(_wrong(f"gives {name.strip()} a second time", text, "Give each parameter once."))
        found[name.strip()] = value
    if errors:
        raise UserErrors(errors)
    return found


def _wrong(what: str, text: str, remedy: str) -> UserError:
    return UserError(ErrorCode.PARAM_INVALID, f"the parameter {what}", where="-p", value=text, remedy=remedy)
