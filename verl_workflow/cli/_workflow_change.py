"""`ray-workflow cancel` and `delete`. Needs no cluster."""

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
