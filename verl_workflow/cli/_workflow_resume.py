"""`ray-workflow resume` and `resume-all`: hand workflows to a cluster's host, and stay with them."""

from __future__ import annotations

import io
import shlex
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout
from enum import Enum
from typing import TYPE_CHECKING, Annotated, Any

import typer

from verl_workflow.cli import _options
from verl_workflow.cli._output import ExitCode, note, print_json, print_line, reported
from verl_workflow.cli._words import location
from verl_workflow.cli._workflow_facts import (
    WorkflowId,
    api_errors,
    full_json,
    is_pipeline,
    open_storage,
    open_workflow,
    status_word,
    summary,
)
from verl_workflow.errors import ErrorCode, UserError, VerlWorkflowError

if TYPE_CHECKING:
    from verl_workflow.storage import Store
    from verl_workflow.workflow import RunState

_POLL_S = 0.5
# The host of a cluster that ends with this process may outlive it by a moment.
_HOST_PATIENCE_S = 30.0


class OnCodeChange(str, Enum):
    """See `verl_workflow.workflow.resume`."""

    ACCEPT = "accept"
    RERUN = "rerun"
    FAIL = "fail"


def resume(
    workflow_id: WorkflowId,
    on_code_change: Annotated[
        OnCodeChange,
        typer.Option(
            "--on-code-change",
            help="When the source of finished steps has changed: keep their values, execute them again, or fail.",
        ),
    ] = OnCodeChange.ACCEPT,
    storage: _options.Storage = None,
    address: _options.Address = None,
    as_json: _options.Json = False,
) -> None:
    """Take a workflow or a pipeline's run up where it was left, and wait for its end.

    Exit code 0: successful, 1: failed, 2: it cannot be resumed (nothing was written), 3: cancelled, 130: stopped with
    Ctrl-C (one on this machine can then be resumed; one in a cluster goes on).
    """
    with reported(as_json):
        store, state = open_workflow(storage, workflow_id)
        if is_pipeline(state):
            _resume_pipeline(workflow_id, on_code_change, storage, address, as_json)
            return
        _refuse(state)
        if state.status.value == "succeeded":
            note(f"workflow {workflow_id} is successful already; there is nothing to resume")
            _tell(state, store, as_json)
            return
        from verl_workflow import workflow

        def begin() -> Any:
            return workflow.resume_async(workflow_id, on_code_change=on_code_change.value)

        follow(workflow_id, store, begin, address=address, as_json=as_json)


def resume_all(
    include_failed: Annotated[bool, typer.Option("--include-failed", help="The failed ones too.")] = False,
    storage: _options.Storage = None,
    address: _options.Address = None,
    as_json: _options.Json = False,
) -> None:
    """Take up all workflows and pipelines' runs that nobody runs, and wait for their ends.

    Workflows run at the same time, as many as their host lets; then the pipelines, one after the other. One that
    cannot be resumed does not keep the others. Exit code 0: all are successful, else 1.
    """
    with reported(as_json):
        from verl_workflow.workflow import list_runs

        store = open_storage(storage)
        wanted = {"resumable"} | ({"failed"} if include_failed else set())
        found = [state for state in list_runs(store) if state.status.value in wanted]
        # Those first that were running.
        found.sort(key=lambda state: (state.owner is None, state.created_at))
        pipelines = [state for state in found if is_pipeline(state)]
        workflows = [state for state in found if not is_pipeline(state)]
        refused: dict[str, VerlWorkflowError] = {}
        cluster = _options.cluster_of(address)
        with _interruptible([state.run_id for state in found], store, cluster, as_json):
            if workflows:
                with _on_cluster(cluster):
                    _run_workflows(workflows, store, refused)
            for state in pipelines:
                _run_pipeline(state, store, cluster, refused)
        _tell_all(found, store, refused, as_json)


def fork(
    workflow_id: WorkflowId,
    step: Annotated[str, typer.Argument(metavar="STEP", help="Task id of the step to start from.", show_default=False)],
    new_id: Annotated[
        str | None, typer.Option("--new-id", metavar="ID", help="Id of the new workflow.  [default: a new one]")
    ] = None,
    storage: _options.Storage = None,
    address: _options.Address = None,
    as_json: _options.Json = False,
) -> None:
    """Run a workflow again from a step on, under another id; what does not depend on the step is taken over.

    Exit codes as for `resume`.
    """
    with reported(as_json):
        from verl_workflow import workflow
        from verl_workflow.workflow import check_fork

        store, state = open_workflow(storage, workflow_id)
        made = f"{uuid.uuid4()}.{time.time():.9f}" if new_id is None else new_id
        with api_errors(workflow_id):
            # Before a cluster is started for it.
            check_fork(store, state, step, made)

        def begin() -> Any:
            return workflow.fork_async(workflow_id, step, new_workflow_id=made)[1]

        follow(made, store, begin, address=address, as_json=as_json)


def follow(workflow_id: str, store: Store, begin: Callable[[], Any], *, address: str | None, as_json: bool) -> None:
    """Join or start Ray, begin a workflow, wait for its end, tell it, and exit with its code.

    Args:
        begin: gives the object reference to the output.
    """
    cluster = _options.cluster_of(address)
    with _interruptible([workflow_id], store, cluster, as_json):
        note(f"workflow {workflow_id}: {_joining(cluster)}")
        with _on_cluster(cluster):
            lost = _await([_begun(workflow_id, begin)], store).get(workflow_id)
    from verl_workflow.workflow import read_run

    state = read_run(store, workflow_id)
    if lost is not None:
        if not isinstance(lost, UserError):
            note(f"resume with: {command('resume', workflow_id, store.uri)}")
        raise lost
    _tell(state, store, as_json)
    raise typer.Exit(_exit_code(state))


def command(verb: str, workflow_id: str, storage: str, *more: str) -> str:
    """A command line that can be pasted; the storage is left out when it is the default one."""
    from verl_workflow.storage import absolute_uri

    options = [*more, *(["--storage", location(storage)] if storage != absolute_uri(_options.DEFAULT_STORAGE) else [])]
    # What begins with a dash would be taken for an option.
    words = [*options, "--", workflow_id] if workflow_id.startswith("-") else [workflow_id, *options]
    return shlex.join(["ray-workflow", verb, *words])


def _resume_pipeline(
    run_id: str, on_code_change: OnCodeChange, storage: str | None, address: str | None, as_json: bool
) -> None:
    if on_code_change is not OnCodeChange.ACCEPT:
        raise UserError(
            ErrorCode.USAGE_INVALID,
            "a pipeline's run always goes on with its recorded copy of the code",
            where="--on-code-change",
            value=on_code_change.value,
            remedy="Leave it out; start a new run to use changed code.",
        )
    from verl_workflow.cli._run import resume as resume_run

    resume_run(run_id, storage=storage, address=address, as_json=as_json)


def _refuse(state: RunState) -> None:
    """Raise UserError unless the workflow can be resumed, or has succeeded: before a cluster is started for it."""
    status = state.status.value
    if status in {"running", "pending"}:
        owner = state.owner or {}
        who = f" by process {owner.get('pid')} on {owner.get('host')}" if owner else ""
        raise UserError(
            ErrorCode.RUN_OWNED,
            f"the workflow is {status}{who}",
            where=state.run_id,
            remedy="Wait for its end, or stop it with: cancel.",
        )
    if status == "cancelled":
        raise UserError(
            ErrorCode.RUN_TERMINAL, "the workflow was cancelled", where=state.run_id, remedy="Run it under another id."
        )


def _begun(workflow_id: str, begin: Callable[[], Any]) -> tuple[str, Any]:
    with api_errors(workflow_id):
        try:
            return workflow_id, begin()
        except RuntimeError as error:
            if "already running or pending" not in str(error):
                raise
            # Somebody was faster.
            raise UserError(
                ErrorCode.RUN_OWNED, str(error).rstrip("."), where=workflow_id, remedy="See it with: status."
            ) from error


def _await(begun: list[tuple[str, Any]], store: Store) -> dict[str, VerlWorkflowError]:
    """Wait until all have ended; returns why those that have not are driven no more."""
    import ray

    from verl_workflow.workflow import TERMINAL_STATES, read_run

    left = {reference: workflow_id for workflow_id, reference in begun}
    lost: dict[str, VerlWorkflowError] = {}
    while left:
        ready, _ = ray.wait(list(left), num_returns=1, timeout=_POLL_S)
        for reference in ready:
            workflow_id = left.pop(reference)
            if read_run(store, workflow_id, progress=False).status in TERMINAL_STATES:
                # What its output is, and whether this machine could load it, is of no matter here.
                continue
            try:
                ray.get(reference)
            except Exception as error:  # noqa: BLE001 - whatever ended its driver, wrapped by Ray
                lost[workflow_id] = _lost(workflow_id, error)
    return lost


def _lost(workflow_id: str, error: Exception) -> VerlWorkflowError:
    cause = getattr(error, "cause", None) or error
    if isinstance(cause, VerlWorkflowError):
        return cause
    first = next(iter(str(cause).strip().splitlines()), type(cause).__name__)
    return VerlWorkflowError(
        ErrorCode.WORKER_LOST, f"nobody drives the workflow any more: {first}", where=workflow_id, retryable=True
    )


def _run_workflows(states: list[RunState], store: Store, refused: dict[str, VerlWorkflowError]) -> None:
    from verl_workflow import workflow

    begun = []
    for state in states:
        run_id = state.run_id
        try:
            begun.append(_begun(run_id, lambda run_id=run_id: workflow.resume_async(run_id)))  # type: ignore[misc]
        except VerlWorkflowError as error:
            refused[run_id] = error
            note(f"warning: workflow {run_id} is not resumed: {error}")
    refused.update(_await(begun, store))


def _run_pipeline(state: RunState, store: Store, cluster: str | None, refused: dict[str, VerlWorkflowError]) -> None:
    from verl_workflow.pipeline import resume as take_up
    from verl_workflow.workflow import TERMINAL_STATES, read_run

    note(f"pipeline {state.run_id}: {_joining(cluster)}")
    ended_epoch = state.epoch if state.status in TERMINAL_STATES else None
    try:
        with redirect_stdout(io.StringIO()):
            run = take_up(store.uri, state.run_id, address=cluster)
            try:
                while (lost := run.driver_error()) is None:
                    now = read_run(store, state.run_id, progress=False)
                    if now.status in TERMINAL_STATES and now.epoch != ended_epoch:
                        return
                    time.sleep(_POLL_S)
            finally:
                run.close()
    except VerlWorkflowError as error:
        lost = error
    if read_run(store, state.run_id, progress=False).status.value not in {"succeeded", "cancelled"}:
        refused[state.run_id] = lost


@contextmanager
def _on_cluster(cluster: str | None) -> Iterator[None]:
    """Ray, joined or started for the time of the block."""
    from verl_workflow.pipeline import connect

    # Ray's client tells of workers that died on the stdout of whoever started it.
    with redirect_stdout(io.StringIO()):
        connect(cluster)
        try:
            yield
        finally:
            import ray

            ray.shutdown()


@contextmanager
def _interruptible(workflow_ids: list[str], store: Store, cluster: str | None, as_json: bool) -> Iterator[None]:
    """Tell, when the user stops waiting, what becomes of the workflows, and exit."""
    from verl_workflow.cli._watch import Terminated, signals_as_interrupts

    with signals_as_interrupts():
        try:
            yield
        except KeyboardInterrupt as stop:
            for workflow_id in workflow_ids:
                _tell_interrupted(workflow_id, store, cluster)
            if as_json:
                print_json({"workflow_ids": workflow_ids, "storage": store.uri, "interrupted": True})
            code = ExitCode.TERMINATED if isinstance(stop, Terminated) else ExitCode.INTERRUPTED
            raise typer.Exit(code) from stop


def _tell_interrupted(workflow_id: str, store: Store, cluster: str | None) -> None:
    from verl_workflow.workflow import RunStatus, read_run

    try:
        state = read_run(store, workflow_id, progress=False)
        deadline = time.monotonic() + _HOST_PATIENCE_S
        while cluster is None and state.status is RunStatus.RUNNING and time.monotonic() < deadline:
            time.sleep(0.1)
            state = read_run(store, workflow_id, progress=False)
    except UserError:
        note("stopped before the workflow was recorded")
        return
    if state.status in {RunStatus.RUNNING, RunStatus.PENDING}:
        note(f"left workflow {workflow_id}, which goes on in the cluster")
        note(f"stop it with: {command('cancel', workflow_id, store.uri)}")
    elif state.status in {RunStatus.SUCCEEDED, RunStatus.CANCELLED}:
        note(f"workflow {workflow_id} has ended: {status_word(state)}")
    else:
        note(f"stopped workflow {workflow_id}; what has been done is kept")
        note(f"resume with: {command('resume', workflow_id, store.uri)}")


def _tell(state: RunState, store: Store, as_json: bool) -> None:
    if as_json:
        print_json(full_json(state, store.uri))
    else:
        for line in summary(state):
            print_line(line)
    if state.error:
        note(f"error: {state.error.get('message', '')}")
    if state.status.value in {"failed", "resumable"}:
        note(f"resume with: {command('resume', state.run_id, store.uri)}")


def _tell_all(found: list[RunState], store: Store, refused: dict[str, VerlWorkflowError], as_json: bool) -> None:
    from verl_workflow.workflow import read_run

    told: list[dict[str, Any]] = []
    for before in found:
        state = read_run(store, before.run_id)
        error = refused.get(before.run_id)
        problem = error.to_json() if error is not None else full_json(state, store.uri)["error"]
        told.append({"workflow_id": state.run_id, "status": status_word(state), "error": problem})
    if as_json:
        print_json({"storage": store.uri, "workflows": told})
    else:
        for each in told:
            print_line(f"workflow {each['workflow_id']}: {each['status']}")
            if each["error"]:
                note(f"error: {each['error']['message']}")
    if not told:
        note(f"nothing is to be resumed in {store.uri}")
    if any(each["status"] != "SUCCESSFUL" for each in told):
        raise typer.Exit(ExitCode.FAILED)


def _exit_code(state: RunState) -> ExitCode:
    return {"succeeded": ExitCode.OK, "cancelled": ExitCode.CANCELLED}.get(state.status.value, ExitCode.FAILED)


def _joining(cluster: str | None) -> str:
    return "starting Ray on this machine" if cluster is None else f"joining Ray at {cluster}"
