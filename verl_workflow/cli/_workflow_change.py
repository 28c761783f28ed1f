"""`ray-workflow cancel`, `delete`, `events send` and `gc`. Needs no cluster."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from verl_workflow.cli import _options
from verl_workflow.cli._output import note, print_json, print_line, reported
from verl_workflow.cli._workflow_facts import WorkflowId, api_errors, open_storage, open_workflow, status_word
from verl_workflow.errors import ErrorCode, UserError, VerlWorkflowError


def cancel(workflow_id: WorkflowId, storage: _options.Storage = None, as_json: _options.Json = False) -> None:
    """Stop a workflow or a pipeline's run, from any machine; a cancelled one cannot be resumed."""
    with reported(as_json):
        from verl_workflow import workflow

        store, _ = open_workflow(storage, workflow_id)
        try:
            with api_errors(workflow_id):
                workflow.cancel(workflow_id)
        except TimeoutError as error:
            raise VerlWorkflowError(
                ErrorCode.STEP_TIMEOUT,
                "the workflow was asked to stop, and has not within 60 s",
                where=workflow_id,
                remedy="The request stands: its driver obeys when it gets to it. See it with: status.",
            ) from error
        state = workflow.read_run(store, workflow_id)
        if as_json:
            print_json({"workflow_id": workflow_id, "storage": store.uri, "status": status_word(state)})
        else:
            print_line(f"workflow {workflow_id}: {status_word(state)}")


def delete(
    workflow_id: WorkflowId,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    storage: _options.Storage = None,
    as_json: _options.Json = False,
) -> None:
    """Remove a workflow or a pipeline's run from the storage, with all it has stored there."""
    with reported(as_json):
        from verl_workflow import workflow

        try:
            store, _ = open_workflow(storage, workflow_id)
        except VerlWorkflowError as error:
            if error.code is not ErrorCode.JOURNAL_DAMAGED:
                raise
            note(f"warning: {error}")
            store = open_storage(storage)
        if not yes:
            _confirm(workflow_id, store.uri, as_json)
        with api_errors(workflow_id):
            workflow.delete(workflow_id)
        if as_json:
            print_json({"workflow_id": workflow_id, "storage": store.uri, "deleted": True})
        else:
            print_line(f"workflow {workflow_id}: deleted")


def send_event(
    workflow_id: WorkflowId,
    event_key: Annotated[str, typer.Argument(metavar="KEY", help="What the workflow waits for.", show_default=False)],
    payload: Annotated[str, typer.Argument(metavar="PAYLOAD", help="JSON that goes with it.")] = "null",
    storage: _options.Storage = None,
    as_json: _options.Json = False,
) -> None:
    """Send an event to a workflow; it is kept until the workflow asks for it.

    To send the same one again is no error; another payload under the same key is refused.
    """
    with reported(as_json):
        from verl_workflow import workflow
        from verl_workflow.stored_json import parse_json

        try:
            value = parse_json(payload)
        except ValueError as error:
            raise UserError(
                ErrorCode.USAGE_INVALID,
                f"the payload is not JSON: {error}",
                where="PAYLOAD",
                value=payload,
                remedy="""Write a text as '"text"', with both kinds of quotes.""",
            ) from error
        # Known before it is sent, so that a mistyped id is answered with the nearest one.
        store, _ = open_workflow(storage, workflow_id)
        with api_errors(workflow_id):
            workflow.send_event(workflow_id, event_key, value)
        if as_json:
            print_json({"workflow_id": workflow_id, "storage": store.uri, "event_key": event_key, "stored": True})
        else:
            print_line(f"workflow {workflow_id}: event {event_key} is stored")


def gc(
    workflow_id: Annotated[
        str | None, typer.Argument(metavar="[ID]", help="Of one workflow or run only.", show_default=False)
    ] = None,
    storage: _options.Storage = None,
    as_json: _options.Json = False,
) -> None:
    """Remove what workflows that ended more than an hour ago need no more; status and outputs stay as they are."""
    with reported(as_json):
        from verl_workflow import workflow

        store = open_storage(storage) if workflow_id is None else open_workflow(storage, workflow_id)[0]
        collected = workflow.gc(workflow_id)
        if as_json:
            print_json({"storage": store.uri, "removed": collected.to_json()})
        else:
            kinds = (
                "entries",
                "snapshots",
                "values",
                "graphs",
                "objects",
                "progress",
                "remains",
                "unfinished",
                "hosts",
            )
            counts = ", ".join(f"{getattr(collected, kind)} {kind}" for kind in kinds)
            print_line(f"{collected.runs} runs: removed {collected.bytes} bytes ({counts})")
        for run_id in collected.damaged:
            note(f"error: {run_id}: its record is damaged, and was left alone; see it with: status")
        if collected.damaged:
            raise typer.Exit(1)


def _confirm(workflow_id: str, storage: str, as_json: bool) -> None:
    if as_json or not sys.stdin.isatty():
        raise UserError(
            ErrorCode.USAGE_INVALID,
            "nobody can be asked whether to delete it",
            where=workflow_id,
            remedy="Say so with --yes.",
        )
    if not typer.confirm(f"Delete workflow {workflow_id} and all it has stored in {storage}?", err=True):
        note("nothing was deleted")
        raise typer.Exit(1)
