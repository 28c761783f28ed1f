"""What the two command lines, `verl-workflow` and `ray-workflow`, have in common."""

from __future__ import annotations

from importlib.metadata import version as installed_version
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from verl_workflow.cli._output import usage_errors

_AS_JSON = "verl_workflow.as_json"


class Commands(TyperGroup):
    """The commands, whose misuse is one JSON document on stdout too when ``--json`` stands among the arguments."""

    def make_context(self, info_name: str | None, args: list[str], parent: Any = None, **extra: Any) -> Any:
        as_json = "--json" in args
        with usage_errors(as_json):
            context = super().make_context(info_name, args, parent, **extra)
        context.meta[_AS_JSON] = as_json
        return context

    def invoke(self, ctx: Any) -> Any:
        # The arguments of a command are read here.
        with usage_errors(ctx.meta[_AS_JSON]):
            return super().invoke(ctx)


def command_line(name: str, about: str) -> typer.Typer:
    """An application without commands yet, that knows ``--help``, ``-h`` and ``--version``."""
    app = typer.Typer(
        name=name,
        cls=Commands,
        help=about,
        no_args_is_help=True,
        # A traceback is for us; rich's boxes around it only get in the way of a bug report.
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["--help", "-h"]},
    )

    app.callback()(_root)
    return app


def _tell_version(context: typer.Context, asked: bool) -> None:
    if asked:
        typer.echo(f"{context.command.name} {installed_version('verl-workflow')}")
        raise typer.Exit


def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_tell_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    pass
