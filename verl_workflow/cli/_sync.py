"""`sync`: sends to trackers what they have not got yet, of a run that has ended or goes on."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from verl_workflow.cli import _options
from verl_workflow.cli._output import ExitCode, print_json, print_line, reported
from verl_workflow.errors import ErrorCode, UserError


def sync(
    run_id: _options.RunId,
    storage: _options.Storage = None,
    stage: Annotated[
        str | None, typer.Option("--stage", metavar="NAME", help="Of this stage only.", show_default=False)
    ] = None,
    as_json: _options.Json = False,
) -> None:
    """Send a run's metrics to its trackers, those that they have not got. Exit code 1: one did not take them."""
    with reported(as_json):
        from verl_workflow.cli._facts import facts_of
        from verl_workflow.cli._find import find_run, near

        store, state = find_run(storage, run_id)
        facts = facts_of(state, store.uri)
        names = [each.name for each in facts.stages]
        if stage is not None and stage not in names:
            what, remedy = "the run has no such stage", near(stage, names) or f"Its stages are {', '.join(names)}."
            raise UserError(ErrorCode.SPEC_INVALID, what, where=run_id, value=stage, remedy=remedy)
        root = Path(facts.artifacts) / "runs" / run_id / "stages"
        told = [one for name in names if stage in (None, name) for one in _sync_stage(root / name, name)]
        if as_json:
            print_json({"run_id": run_id, "trackers": told})
        else:
            for one in told:
                print_line(f"{one['stage']}: {one['tracker']}: {one['outcome']}")
            if not told:
                print_line("the run has no trackers")
        if any(one["failed"] for one in told):
            raise typer.Exit(ExitCode.FAILED)


def _sync_stage(stage_dir: Path, name: str) -> list[dict[str, Any]]:
    from verl_workflow.trackers import Sender, kept

    facts = kept(stage_dir)
    if facts is None:
        return []
    told = []
    for number in range(len(facts.trackers)):
        sender = Sender(stage_dir, facts, number)
        count, failed = 0, False
        with sender.alone() as alone:
            if not alone:
                outcome = "the run itself sends to it"
            else:
                try:
                    count = sender.flush()
                    sender.close()
                    outcome = f"{count} steps sent, it has all up to {sender.sent}"
                except Exception as error:  # noqa: BLE001 - clients of trackers raise what they like
                    failed = True
                    outcome = f"it has all up to {sender.sent}, and did not take the rest: {error}"
        told.append(
            {
                "stage": name,
                "tracker": sender.name,
                "sent": count,
                "up_to": sender.sent,
                "failed": failed,
                "outcome": outcome,
            }
        )
    return told
