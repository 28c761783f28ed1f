"""The command line: its commands in the order in which they are met."""

from __future__ import annotations

from verl_workflow.cli._cancel import cancel
from verl_workflow.cli._check import plan, schema, validate
from verl_workflow.cli._commands import command_line
from verl_workflow.cli._explain import explain
from verl_workflow.cli._init import init
from verl_workflow.cli._lint import lint
from verl_workflow.cli._logs import logs
from verl_workflow.cli._models import models
from verl_workflow.cli._output import checked_stdout
from verl_workflow.cli._plot import plot
from verl_workflow.cli._run import resume, run
from verl_workflow.cli._status import list_, status
from verl_workflow.cli._sync import sync

app = command_line("verl-workflow", "Durable, resumable post-training pipelines on Ray with verl.")
app.command()(init)
app.command()(validate)
app.command()(plan)
app.command()(lint)
app.command()(schema)
app.command()(run)
app.command()(resume)
app.command()(status)
app.command("list")(list_)
app.command()(explain)
app.command()(logs)
app.command()(plot)
app.command()(sync)
app.command()(cancel)
app.command()(models)


def main() -> None:
    """Entry point of the console script ``verl-workflow``."""
    with checked_stdout():
        app()
