"""`explain`: why a run failed, what was tried, what it cost, and what to do next."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from verl_workflow.cli import _options
from verl_workflow.cli._output import print_json, print_line, reported
from verl_workflow.errors import ErrorCode, UserError

if TYPE_CHECKING:
    from verl_workflow.cli._facts import StageFacts


def explain(
    run_id: _options.RunId,
    storage: _options.Storage = None,
    stage: Annotated[
        str | None, typer.Option("--stage", metavar="NAME", help="Of this stage only.", show_default=False)
    ] = None,
    as_json: _options.Json = False,
) -> None:
    """Tell why a run failed: each attempt's class of failure and evidence, what was tried, its cost, and what to do."""
    with reported(as_json):
        from verl_workflow.cli._account import account_of, total
        from verl_workflow.cli._account_lines import lines_of
        from verl_workflow.cli._facts import facts_of
        from verl_workflow.cli._find import find_run, near
        from verl_workflow.cli._summary import advice

        store, state = find_run(storage, run_id)
        facts = facts_of(state, store.uri)
        names = [each.name for each in facts.stages]
        if stage is not None and stage not in names:
            what, remedy = "the run has no such stage", near(stage, names) or f"Its stages are {', '.join(names)}."
            raise UserError(ErrorCode.SPEC_INVALID, what, where=run_id, value=stage, remedy=remedy)
        chosen = [each for each in facts.stages if (_of_note(each) if stage is None else each.name == stage)]
        accounts = [account_of(facts, each) for each in chosen]
        to_do = advice(facts, told=[each["stage"] for each in accounts if each["told"]])
        if as_json:
            run: dict[str, Any] = {"run_id": run_id, "status": facts.status}
            print_json({**run, "stages": accounts, "spent": total(accounts), "next": to_do})
            return
        for line in lines_of(facts, accounts, [] if stage is not None else to_do):
            print_line(line)


def _of_note(stage: StageFacts) -> bool:
    """Whether there is something to explain: it failed, or took more than one attempt, or is being tried."""
    return (stage.status not in {"succeeded", "waiting"} and bool(stage.attempts)) or len(stage.attempts) > 1
