"""The command line `ray-workflow`: look after the workflows of a storage, and the runs of pipelines beside them."""

from __future__ import annotations

import typer

from verl_workflow.cli._commands import command_line
from verl_workflow.cli._output import checked_stdout
from verl_workflow.cli._workflow_change import cancel, delete, gc, send_event
from verl_workflow.cli._workflow_resume import fork, resume, resume_all
from verl_workflow.cli._workflow_show import list_, metadata, output, status

ray_workflow_app = command_line("ray-workflow", "Durable workflows on Ray: list, resume, cancel and read them.")
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
