"""The command line: its commands in the order in which they are met."""

from __future__ import annotations

from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from verl_workflow.cli._cancel import cancel
from verl_workflow.cli._check import plan, schema, validate
from verl_workflow.cli._init import init
from verl_workflow.cli._logs import logs
from verl_workflow.cli._models import models
from verl_workflow.cli._output import checked_stdout, usage_errors
from verl_workflow.cli._plot import plot
from verl_workflow.cli._run import resume, run
from verl_workflow.cli._status import list_, status


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


_AS_JSON = "verl_workflow.as_json"

app = typer.Typer(
    name="verl-workflow",
    cls=Commands,
    help="Durable, resumable post-training pipelines on Ray with verl.",
    no_args_is_help=True,
    # A traceback is for us; rich's boxes around it only get in the way of a bug report.
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["--help", "-h"]},
)


def _version(asked: bool) -> None:
    if asked:
        from importlib.metadata import version

        typer.echo(f"verl-workflow {version('verl-workflow')}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    pass


app.command()(init)
app.command()(validate)
app.command()(plan)
app.command()(schema)
app.command()(run)
app.command()(resume)
app.command()(status)
app.command("list")(list_)
app.command()(logs)
app.command()(plot)
app.command()(cancel)
app.command()(models)


def main() -> None:
    """Entry point of the console script ``verl-workflow``."""
    with checked_stdout():
        app()
