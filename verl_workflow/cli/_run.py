"""`run` and `resume`: start a run's driver and stay with it."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated

import typer

from verl_workflow.cli import _options
from verl_workflow.cli._output import ExitCode, note, print_json, print_line, reported
from verl_workflow.cli._words import command
from verl_workflow.errors import ErrorCode, UserError

if TYPE_CHECKING:
    from verl_workflow.cli._watch import Head
    from verl_workflow.pipeline import Run

_Detach = Annotated[
    bool, typer.Option("--detach", help="Return when the run has been handed to the cluster (needs --address).")
]
_Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Show the result only.")]


def run(
    file: _options.PipelineFile,
    params: _options.Params = None,
    run_id: Annotated[
        str | None,
        typer.Option("--run-id", metavar="ID", help="Id of the run.  [default: made from name and time]"),
    ] = None,
    storage: _options.PipelineStorage = None,
    address: _options.Address = None,
    detach: _Detach = False,
    quiet: _Quiet = False,
    as_json: _options.Json = False,
) -> None:
    """Run a pipeline, and show how it goes until it ends.

    Exit code 0: succeeded, 1: failed, 2: a mistake in the input (nothing was written), 3: cancelled, 130: stopped with
    Ctrl-C (it can be resumed).
    """
    with reported(as_json):
        from verl_workflow.pipeline import define, start
        from verl_workflow.spec import load

        cluster = _cluster(address, detach)
        document = load(file, _options.params_of(params))
        definition = define(document, run_id=run_id, storage=_options.pipeline_storage_of(storage))
        _drive(
            lambda: start(definition, address=cluster),
            definition.run_id,
            definition.storage,
            detach=detach,
            quiet=quiet,
            as_json=as_json,
        )


def resume(
    run_id: _options.RunId,
    storage: _options.Storage = None,
    address: _options.Address = None,
    force: Annotated[
        bool, typer.Option("--force", help="Take the run from a driver that still shows signs of life; it is fenced.")
    ] = False,
    detach: _Detach = False,
    quiet: _Quiet = False,
    as_json: _options.Json = False,
) -> None:
    """Take a stopped or failed run up where it ended; what has succeeded is not run again. Exit codes as for `run`."""
    with reported(as_json):
        from verl_workflow.cli._find import find_run
        from verl_workflow.pipeline import resume as take_up

        cluster = _cluster(address, detach)
        store, _ = find_run(storage, run_id)
        _drive(
            lambda: take_up(store.uri, run_id, address=cluster, force=force),
            run_id,
            store.uri,
            detach=detach,
            quiet=quiet,
            as_json=as_json,
        )


def _drive(
    begin: Callable[[], Run],
    run_id: str,
    storage: str,
    *,
    detach: bool,
    quiet: bool,
    as_json: bool,
) -> None:
    """Begin, watch to the end, tell the result, and exit with its code."""
    from verl_workflow.cli._facts import RunFacts
    from verl_workflow.cli._summary import advice, summary
    from verl_workflow.cli._view import open_view
    from verl_workflow.cli._watch import Terminated, signals_as_interrupts, watch
    from verl_workflow.storage import Store

    facts: RunFacts
    run: Run | None = None
    with signals_as_interrupts():
        try:
            if not quiet:
                note(f"run {run_id}")
            run = begin()
            for warning in run.warnings:
                note(f"warning: {warning}")
            if detach:
                _tell_detached(run_id, storage, as_json)
                return
            view = open_view(quiet)
            try:
                facts, lost = watch(Store(storage), run_id, view, driver_error=run.driver_error, head=_head(run.local))
            finally:
                view.close()
            for line in [f"error: {lost}"] if lost is not None else []:
                note(line)
            if as_json:
                print_json({**facts.to_json(), "driver_error": lost})
            else:
                for line in summary(facts):
                    print_line(line)
            for line in advice(facts):
                note(line)
        except KeyboardInterrupt as stop:
            _tell_interrupted(run, run_id, storage)
            code = ExitCode.TERMINATED if isinstance(stop, Terminated) else ExitCode.INTERRUPTED
            raise typer.Exit(code) from stop
        finally:
            if run is not None:
                run.close()
    raise typer.Exit(exit_code(facts))


def exit_code(facts: object) -> ExitCode:
    """What a run's last state means to a script."""
    status = getattr(facts, "status", "")
    return {"succeeded": ExitCode.OK, "cancelled": ExitCode.CANCELLED}.get(status, ExitCode.FAILED)


def _cluster(address: str | None, detach: bool) -> str | None:
    cluster = _options.cluster_of(address)
    if detach and cluster is None:
        raise UserError(
            ErrorCode.CLUSTER_UNREACHABLE,
            "a run cannot be detached from a cluster that ends with this command",
            where="--detach",
            remedy="Name a running Ray cluster with --address or RAY_ADDRESS, or leave --detach out.",
        )
    return cluster


def _head(local: bool) -> Head | None:
    """The head of the cluster that this process is in; None behind a Ray client, which has its own connection."""
    import ray

    from verl_workflow.cli._watch import Head

    if ray.util.client.ray.is_connected():
        return None
    return Head(ray.get_runtime_context().gcs_address, local=local)


def _tell_detached(run_id: str, storage: str, as_json: bool) -> None:
    if as_json:
        print_json({"run_id": run_id, "storage": storage, "detached": True})
        return
    print_line(f"run {run_id} goes on in the cluster")
    for verb, more in (("status", ()), ("logs", ("-f",)), ("cancel", ())):
        print_line(f"  {command(verb, run_id, storage, *more)}")


def _tell_interrupted(run: Run | None, run_id: str, storage: str) -> None:
    if run is not None and not run.local:
        note(f"left run {run_id}, which goes on in the cluster; stop it with: {command('cancel', run_id, storage)}")
        return
    note(f"stopped run {run_id}; what has been done is kept")
    note(f"resume with: {command('resume', run_id, storage)}")
