"""`run` and `resume`: start a run's driver and stay with it."""

from __future__ import annotations

import io
from collections.abc import Callable
from contextlib import redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from verl_workflow.cli import _options
from verl_workflow.cli._output import ExitCode, note, print_json, print_line, reported
from verl_workflow.cli._words import command
from verl_workflow.errors import ErrorCode, UserError, VerlWorkflowError

if TYPE_CHECKING:
    from verl_workflow.cli._facts import RunFacts
    from verl_workflow.pipeline import Run

# Within it a step ends and its checkpoint is written, unless they take long; whoever ends a machine waits less.
_SAVE_SECONDS = 600.0
_EXIT_CODES = {"succeeded": ExitCode.OK, "cancelled": ExitCode.CANCELLED}
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
    fresh: Annotated[bool, typer.Option("--fresh", help="Re-use no results of earlier runs.")] = False,
    detach: _Detach = False,
    quiet: _Quiet = False,
    as_json: _options.Json = False,
) -> None:
    """Run a pipeline, and show how it goes until it ends.

    Exit code 0: succeeded, 1: failed, 2: a mistake in the input (nothing was written), 3: cancelled, 130: stopped with
    Ctrl-C (a run on this machine can then be resumed; one in a cluster goes on).
    """
    with reported(as_json):
        from verl_workflow.pipeline import define, start
        from verl_workflow.spec import load

        cluster = _cluster(address, detach)
        document = load(file, _options.params_of(params))
        definition = define(document, run_id=run_id, storage=_options.pipeline_storage_of(storage), reuse=not fresh)
        _Session(
            run_id=definition.run_id,
            storage=definition.storage,
            address=cluster,
            begin=lambda: start(definition, address=cluster),
            detach=detach,
            quiet=quiet,
            as_json=as_json,
        ).go()


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
    """Take a stopped or failed run up where it ended; what has succeeded is not run again.

    Exit codes as for `run`. A run that has succeeded already is told as it is, with exit code 0.
    """
    with reported(as_json):
        from verl_workflow.cli._find import find_run

        cluster = _cluster(address, detach)
        store, state = find_run(storage, run_id)

        from verl_workflow.pipeline import resume as take_up
        from verl_workflow.workflow import TERMINAL_STATES, RunStatus

        session = _Session(
            run_id=run_id,
            storage=store.uri,
            address=cluster,
            begin=lambda: take_up(store.uri, run_id, address=cluster, force=force),
            ended_epoch=state.epoch if state.status in TERMINAL_STATES else None,
            detach=detach,
            quiet=quiet,
            as_json=as_json,
        )
        if state.status is RunStatus.SUCCEEDED:
            raise typer.Exit(session.tell_succeeded())
        session.go()


@dataclass(frozen=True, kw_only=True)
class _Session:
    """A run from its start to the exit code of the command."""

    run_id: str
    storage: str
    address: str | None
    begin: Callable[[], Run]
    detach: bool
    quiet: bool
    as_json: bool
    ended_epoch: int | None = None

    def go(self) -> None:
        """Begin, watch, tell the result, and exit with its code."""
        from verl_workflow.cli._watch import Terminated, signals_as_interrupts

        runs: list[Run] = []
        with signals_as_interrupts():
            try:
                seen = self._followed(runs)
                code = self._tell_detached() if seen is None else self._tell_end(*seen)
            except KeyboardInterrupt as stop:
                self._tell_interrupted(*runs)
                code = ExitCode.TERMINATED if isinstance(stop, Terminated) else ExitCode.INTERRUPTED
            except VerlWorkflowError as error:
                # Between the first look at a run and its resumption, its old driver may have ended it.
                if error.code is ErrorCode.RUN_TERMINAL and self._succeeded():
                    raise typer.Exit(self.tell_succeeded()) from None
                if not isinstance(error, UserError) and self._recorded():
                    note(f"resume with: {self._command('resume')}")
                raise
        raise typer.Exit(code)

    def _followed(self, runs: list[Run]) -> tuple[RunFacts, object | None] | None:
        """Begin and watch; the cluster has been left on return, so that nothing comes in between the result's lines.

        Args:
            runs: gets what was begun.

        Returns:
            As `watch`; None for a run that was detached.
        """
        if not self.quiet:
            note(f"run {self.run_id}: {self._joining()}")
        from verl_workflow.cli._watch import Terminated

        # Ray's client tells of workers that died on the stdout of whoever started it; its own logs keep that.
        with redirect_stdout(_Unheard()):
            try:
                run = self.begin()
                runs.append(run)
                for warning in run.warnings:
                    note(f"warning: {warning}")
                return None if self.detach else self._watched(run)
            except KeyboardInterrupt as stop:
                if runs and runs[0].local:
                    if isinstance(stop, Terminated):
                        self._save()
                    note("stopping")
                raise
            finally:
                for run in runs:
                    run.close()

    def _save(self) -> None:
        """Let trainings save before their machine goes; a further signal ends the waiting."""
        from verl_workflow.cli._facts import facts_of
        from verl_workflow.storage import Store
        from verl_workflow.training import all_saved, ask_to_save
        from verl_workflow.workflow import read_run

        try:
            facts = facts_of(read_run(Store(self.storage), self.run_id), self.storage)
            asked = ask_to_save(Path(facts.artifacts) / "runs" / self.run_id, facts.epoch) if facts.artifacts else []
            if asked:
                note("the training saves after its step; SIGTERM again stops it at once")
                if not all_saved(asked, facts.epoch, _SAVE_SECONDS):
                    note(f"it has not saved within {_SAVE_SECONDS:.0f} s")
        except KeyboardInterrupt:
            note("stopping at once")
        except VerlWorkflowError as error:
            note(f"the training could not be asked to save: {error}")

    def tell_succeeded(self) -> ExitCode:
        """The result of a run that needs no resumption."""
        from verl_workflow.cli._facts import facts_of
        from verl_workflow.storage import Store
        from verl_workflow.workflow import read_run

        note(f"run {self.run_id} has succeeded already; there is nothing to resume")
        self._tell_result(facts_of(read_run(Store(self.storage), self.run_id), self.storage, values=True), None)
        return ExitCode.OK

    def _watched(self, run: Run) -> tuple[RunFacts, object | None]:
        from verl_workflow.cli._view import open_view
        from verl_workflow.cli._watch import watch
        from verl_workflow.storage import Store

        store = Store(self.storage)
        view = open_view(self.quiet)
        try:
            facts, lost = watch(store, self.run_id, view, driver_error=run.driver_error, ended_epoch=self.ended_epoch)
            if lost is not None and run.local:
                # Without its head a cluster works on for a while and may yet end the run: what is told must be final.
                run.close()
                facts, lost = watch(store, self.run_id, view, driver_error=lambda: lost, ended_epoch=self.ended_epoch)
        finally:
            view.close()
        return facts, lost

    def _tell_end(self, facts: RunFacts, lost: object | None) -> ExitCode:
        if isinstance(lost, UserError):
            raise lost
        self._tell_result(facts, lost)
        return ExitCode.FAILED if lost is not None else _EXIT_CODES.get(facts.status, ExitCode.FAILED)

    def _tell_result(self, facts: RunFacts, lost: object | None) -> None:
        from verl_workflow.cli._summary import advice, summary

        if self.as_json:
            print_json({**facts.to_json(), "driver_error": None if lost is None else str(lost)})
        else:
            for line in summary(facts):
                print_line(line)
        for line in advice(facts, lost):
            note(line)

    def _tell_detached(self) -> ExitCode:
        if self.as_json:
            print_json({"run_id": self.run_id, "storage": self.storage, "detached": True})
        else:
            print_line(f"run {self.run_id} goes on in the cluster:")
            for words in (("status",), ("logs", "-f"), ("cancel",)):
                print_line(f"  {self._command(*words)}")
        return ExitCode.OK

    def _tell_interrupted(self, run: Run | None = None) -> None:
        if run is not None and not run.local:
            note(f"left run {self.run_id}, which goes on in the cluster")
            note(f"stop it with: {self._command('cancel')}")
        elif self._recorded():
            note(f"stopped run {self.run_id}; what has been done is kept")
            note(f"resume with: {self._command('resume')}")
        else:
            note("stopped before the run was recorded")
        if self.as_json:
            print_json({"run_id": self.run_id, "storage": self.storage, "interrupted": True})

    def _joining(self) -> str:
        return "starting Ray on this machine" if self.address is None else f"joining Ray at {self.address}"

    def _succeeded(self) -> bool:
        from verl_workflow.storage import Store
        from verl_workflow.workflow import RunStatus, read_run

        return read_run(Store(self.storage), self.run_id).status is RunStatus.SUCCEEDED

    def _recorded(self) -> bool:
        from verl_workflow.storage import Store

        return Store(self.storage).get(f"runs/{self.run_id}/definition.json") is not None

    def _command(self, verb: str, *more: str) -> str:
        return command(verb, self.run_id, self.storage, *more)


class _Unheard(io.TextIOBase):
    """A stream into nothing."""

    def write(self, text: str) -> int:
        return len(text)


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
