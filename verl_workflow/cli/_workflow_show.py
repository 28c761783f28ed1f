"""`ray-workflow list`, `status`, `output` and `metadata`: what the storage says. Needs no cluster."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated

import typer

from verl_workflow.cli import _options
from verl_workflow.cli._output import note, print_json, print_line, print_table, reported
from verl_workflow.cli._words import duration, moment
from verl_workflow.cli._workflow_facts import (
    Task,
    WorkflowId,
    api_errors,
    brief_json,
    full_json,
    is_pipeline,
    is_plain_json,
    open_storage,
    open_workflow,
    plain,
    shown,
    status_word,
    summary,
)
from verl_workflow.errors import ErrorCode, UserError

if TYPE_CHECKING:
    from verl_workflow.storage import Store
    from verl_workflow.workflow import RunState


def list_(
    status: Annotated[
        str | None, typer.Option("--status", metavar="STATUS", help="Only those of this status.", show_default=False)
    ] = None,
    storage: _options.Storage = None,
    as_json: _options.Json = False,
) -> None:
    """List the workflows and pipelines' runs of the storage, newest first."""
    with reported(as_json):
        from rich.table import Table

        from verl_workflow.workflow import list_runs

        wanted = None if status is None else _status(status)
        store = open_storage(storage)
        found = [state for state in list_runs(store) if wanted in (None, status_word(state))]
        found.sort(key=lambda state: (state.created_at or 0.0, state.run_id), reverse=True)
        if as_json:
            print_json({"storage": store.uri, "workflows": [brief_json(state) for state in found]})
            return
        if not found:
            note(f"no workflows in {store.uri}" if wanted is None else f"no workflows in {store.uri} are {wanted}")
            return
        rows = Table("workflow", "kind", "status", "created", "elapsed", box=None, pad_edge=False)
        for each in map(brief_json, found):
            rows.add_row(
                each["workflow_id"],
                each["kind"],
                each["status"],
                moment(each["created_at"]),
                duration(each["elapsed_seconds"]),
            )
        print_table(rows)
        for state in found:
            if state.status.value == "damaged" and state.error:
                note(f"error: {state.run_id}: {state.error['message']}")


def status(workflow_id: WorkflowId, storage: _options.Storage = None, as_json: _options.Json = False) -> None:
    """Tell where a workflow or a pipeline's run stands, step by step."""
    with reported(as_json):
        store, state = open_workflow(storage, workflow_id)
        if as_json:
            print_json(full_json(state, store.uri))
            return
        for line in summary(state):
            print_line(line)
        if state.error:
            note(f"error: {state.error.get('message', '')}")


def output(
    workflow_id: WorkflowId, task: Task = None, storage: _options.Storage = None, as_json: _options.Json = False
) -> None:
    """Print the output of a workflow, or of one of its steps; waits for one that is running.

    Plain JSON is printed as that, any other value by its repr.
    """
    with reported(as_json):
        from verl_workflow import workflow

        store, state = open_workflow(storage, workflow_id)
        _find_modules(store, state)
        with api_errors(workflow_id):
            value = workflow.get_output(workflow_id, task_id=task)
        as_it_is = is_plain_json(value)
        if as_json:
            told = {"value": value} if as_it_is else {"repr": shown(value)}
            print_json({"workflow_id": workflow_id, "task_id": task, "is_json": as_it_is, **told})
        elif as_it_is:
            print_json(value)
        else:
            note(f"the output is no plain JSON but a {type(value).__name__}; this is its repr")
            print_line(shown(value))


def metadata(
    workflow_id: WorkflowId, task: Task = None, storage: _options.Storage = None, as_json: _options.Json = False
) -> None:
    """Print what is known of a workflow, or of one of its steps, as JSON."""
    with reported(as_json):
        from verl_workflow import workflow

        _, state = open_workflow(storage, workflow_id)
        with api_errors(workflow_id):
            if task is not None and is_pipeline(state):
                raise UserError(
                    ErrorCode.USAGE_INVALID,
                    "the stages of a pipeline have no metadata",
                    where=workflow_id,
                    value=task,
                    remedy="See them with: status, or verl-workflow status.",
                )
            print_json(plain(workflow.get_metadata(workflow_id, task)))


def _status(text: str) -> str:
    from verl_workflow.cli._find import near
    from verl_workflow.workflow import WorkflowStatus

    known = [each.value for each in WorkflowStatus]
    if text.upper() not in known:
        raise UserError(
            ErrorCode.USAGE_INVALID,
            "this is no status",
            where="--status",
            value=text,
            remedy=near(text.upper(), known) or f"Use one of {', '.join(known)}.",
        )
    return text.upper()


def _find_modules(store: Store, state: RunState) -> None:
    """Look for the classes of values where the workflow was made: a console script knows only what is installed."""
    from verl_workflow.workflow import module_path

    sys.path.extend(folder for folder in module_path(state, store) if folder not in sys.path)
