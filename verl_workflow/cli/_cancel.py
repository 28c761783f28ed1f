"""`cancel`: ask a run to stop, and see that it did."""

from __future__ import annotations

import time
from typing import Annotated

import typer

from verl_workflow.cli import _options
from verl_workflow.cli._output import note, print_json, print_line, reported
from verl_workflow.errors import ErrorCode, UserError, VerlWorkflowError

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
        from verl_workflow.workflow import read_run, request_cancel

        store, state = find_run(storage, run_id)
        facts = facts_of(state, store.uri)
        if facts.ended and facts.status != "cancelled":
            raise UserError(
                ErrorCode.RUN_TERMINAL,
                f"the run has {facts.status} and cannot be cancelled",
                where=run_id,
                remedy=f"See it with: verl-workflow status {run_id}.",
            )
        if not facts.ended:
            request_cancel(store, run_id)
            deadline = time.monotonic() + timeout
            if wait:
                note(f"asked run {run_id} to stop")
            while wait and not facts.ended and time.monotonic() < deadline:
                time.sleep(_POLL_S)
                facts = facts_of(read_run(store, run_id), store.uri)
            if wait and not facts.ended:
                raise VerlWorkflowError(
                    ErrorCode.STEP_TIMEOUT,
                    f"the run has not stopped within {timeout:g} s",
                    where=run_id,
                    remedy="Its driver may be gone: the request stands, and a driver that takes the run up obeys it.",
                )
        if as_json:
            print_json({"run_id": run_id, "storage": store.uri, "status": facts.status, "requested": True})
        else:
            print_line(f"run {run_id}: {facts.status if facts.ended else 'asked to stop'}")
