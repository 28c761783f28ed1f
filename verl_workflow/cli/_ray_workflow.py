"""The command line `ray-workflow`: look after the workflows of a storage, and the runs of pipelines beside them."""

from __future__ import annotations

from typing import Annotated

import typer

from verl_workflow.cli._app import Commands
from verl_workflow.cli._output import checked_stdout
from verl_workflow.cli._workflow_change import cancel, delete, gc, send_event
from verl_workflow.cli._workflow_resume import fork, resume, resume_all
from verl_workflow.cli._workflow_show import list_, metadata, output, status

ray_workflow_app = typer.Typer(
    name="ray-workflow",
    cls=Commands,
    help="Durable workflows on Ray: list, resume, cancel and read them.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["--help", "-h"]},
)


def _version(asked: bool) -> None:
    if asked:
        from importlib.metadata import version

        typer.echo(f"ray-workflow {version('verl-workflow')}")
        raise typer.Exit


@ray_workflow_app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    pass


ray_workflow_app.command("list")(list_)
ray_workflow_app.command()(status)
ray_workflow_app.command()(resume)
ray_workflow_app.command()(resume_all)
ray_workflow_app.command()(fork)
ray_workflow_app.command()(cancel)
ray_workflow_app.command()(delete)
ray_workflow_app.command()(output)
ray_workflow_app.command()(metadata)
ray_workflow_app.command()(gc)

_events = typer.Typer(help="Events for workflows that wait for them.", no_args_is_help=True)
_events.command("send")(send_event)
ray_workflow_app.add_typer(_events, name="events")


def main() -> None:
    """Entry point of the console script ``ray-workflow``."""
    with checked_stdout():
        ray_workflow_app()
