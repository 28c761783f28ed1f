"""`plot`: how the training of a run went, as a picture."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from verl_workflow.cli import _options
from verl_workflow.cli._output import print_json, print_line, reported
from verl_workflow.errors import ErrorCode, UserError


def plot(
    run_id: _options.RunId,
    output: Annotated[
        Path | None,
        typer.Option(
            "--output",
            "-o",
            metavar="PATH",
            help="The picture to write: png, svg or pdf.  [default: RUN.png]",
            show_default=False,
        ),
    ] = None,
    storage: _options.Storage = None,
    as_json: _options.Json = False,
) -> None:
    """Draw the reward of a run's trainings, finished or going on, with its evaluations and resumptions."""
    with reported(as_json):
        from verl_workflow.cli._find import find_run
        from verl_workflow.outline import outline_of
        from verl_workflow.report import draw, learning_of

        _, state = find_run(storage, run_id)
        learnings = learning_of(state)
        if not learnings:
            raise UserError(
                ErrorCode.DATA_INVALID,
                "no training of the run has made a step yet",
                where=run_id,
                remedy="Look at its state with verl-workflow status.",
            )
        path = output or Path(f"{run_id}.png")
        draw(learnings, path, title=f"{outline_of(state).pipeline}: {run_id}")
        if as_json:
            print_json({"run_id": run_id, "path": str(path.absolute())})
        else:
            print_line(str(path))
