"""`cancel`: ask a run to stop, and see that it did."""

from __future__ import annotations

import time
from typing import Annotated

import typer

from verl_workflow.cli import _options
from verl_workflow.cli._output import note, print_json, print_line, reported
from verl_workflow.errors import ErrorCode, VerlWorkflowError

_POLL_S = 0.5


def cancel(
    run_id: _options.RunId,
    storage: _options.Storage = None,
    wait: Annotated[bool, typer.Option("--wait/--no-wait", help="Return when the run is seen to have stopped.")] = True,
    timeout: Annotated[float, typer.Option(metavar="SECONDS", min=0, help="How long to wait.")] = 120.0,
    as_json: _options.Json = False,
) -> None:
    """Ask a run to stop, from any machine; a cancelled run cannot be resumed."""
    with reported(as_json):
        from verl_workflow.cli._facts import facts_of
        from verl_workflow.cli._find import find_run
        from verl_workflow.workflow import RunStatus, read_run, request_cancel

        store, state = find_run(storage, run_id)
        # What was asked for has happened already.
        if state.status is not RunStatus.CANCELLED:
            state = request_cancel(store, run_id)
        facts = facts_of(state, store.uri)
        if wait and not facts.ended:
            note(f"asked run {run_id} to stop")
            deadline = time.monotonic() + timeout
            while not facts.ended:
                if time.monotonic() > deadline:
                    raise VerlWorkflowError(
                        ErrorCode.STEP_TIMEOUT,
                        f"the run has not stopped within {timeout:g} s",
                        where=run_id,
                        remedy="The request stands: its driver obeys when it gets to it. See it with: status.",
                    )
                time.sleep(_POLL_S)
                facts = facts_of(read_run(store, run_id), store.uri)
        if as_json:
            print_json({"run_id": run_id, "storage": store.uri, "status": facts.status})
        else:
            print_line(f"run {run_id}: {facts.status if facts.ended else 'asked to stop'}")
