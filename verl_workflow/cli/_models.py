"""`models`: what is in the registry, what each alias points to and pointed to, and where a version comes from."""

from __future__ import annotations

from typing import Annotated

import typer

from verl_workflow.cli import _options
from verl_workflow.cli._output import print_json, reported


def models(
    name: Annotated[str | None, typer.Argument(metavar="[NAME]", help="One model.", show_default=False)] = None,
    storage: _options.Storage = None,
    as_json: _options.Json = False,
) -> None:
    """List the models in the registry, or the versions, aliases and lineage of one."""
    with reported(as_json):
        print_json({})
