"""Runs as anybody can read them from the storage, with or without Ray."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Collection, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from verl_workflow.errors import ErrorCode, UserError, VerlWorkflowError
from verl_workflow.storage import Store
from verl_workflow.workflow._damage import damaged
from verl_workflow.workflow._definition import bears, foreign, key_of, parse_definition, read_definition, seed_of
from verl_workflow.workflow._fold import TERMINAL_STATES, Attempt, Folded, FoldedStep, RunStatus, StepStatus
from verl_workflow.workflow._graph import Graph
from verl_workflow.workflow._heartbeat import LEASE_S, known_gone, read_heartbeat
from verl_workflow.workflow._host_life import is_alive
from verl_workflow.workflow._journal import Journal
from verl_workflow.workflow._names import RunKey, path_part
from verl_workflow.workflow._owner import this_process
from verl_workflow.workflow._progress import read_progress
from verl_workflow.workflow._records import CancelRequested, Claimed, RunCancelled, StepSucceeded
from verl_workflow.workflow._turn import is_given_up, waiting_turn

_AT_A_TIME = 16


@dataclass(frozen=True, kw_only=True)
class StepState:
    """One step of a run.

    Attributes:
        attempts: oldest first; empty for a step that has not started or whose value was re-used.
        progress: what the latest attempt last reported, None when it said nothing.
        reused_from: id of the run whose value stands in, None when the step ran here.
        continued_to: the step whose value becomes this one's, when it has returned other steps. continued_steps: all of
            those, this one the last.
        code: digest of its function's source where that is no longer the one in its graph.
    """

    name: str
    status: StepStatus
    attempts: tuple[Attempt, ...] = ()
    progress: Mapping[str, Any] | None = None
    reused_from: str | None = None
    continued_to: str | None = None
    continued_steps: tuple[str, ...] = ()
    code: str | None = field(default=None, repr=False)
    committed: StepSucceeded | None = field(default=None, repr=False)
    store: Store | None = field(default=None, repr=False, compare=False)

    @cached_property
    def value(self) -> Any:
        """What the step returned, read from the storage when first asked for; None unless it has succeeded.

        Raises:
            VerlWorkflowError(JOURNAL_DAMAGED): the value is not what was recorded.
        """
        if self.committed is None:
            return None
        assert self.store is not None
        return load_value(self.store, self.committed)

    @property
    def kept(self) -> bool:
        """Whether the value is there: the step has succeeded, and its value was to be written down."""
        return self.committed is not None and self.committed.value_kept


@dataclass(frozen=True, kw_only=True)
class RunState:
    """A run as its journal and heartbeat tell it. All times are seconds since 1970.

    Attributes:
        epoch: 0 until a driver has claimed the run; one more for each claim.
        owner: the last driver's process: ``host``, ``pid`` and more; None before the first claim.
        ended_at: None unless the status is terminal.
        steps: by name, in the plan's order; empty before the first claim.
        error: why the run failed; `VerlWorkflowError.to_json`.
        heartbeat_age_s: since the driver's last sign of life, by this machine's clock; None when there was none.
        cancel_requested: somebody has asked the run to stop, and its driver may not have done so yet.
        definition: as given to `create_run`.
        host: token of the host that is to drive it, for workflows.
    """

    run_id: str
    status: RunStatus
    epoch: int = 0
    owner: Mapping[str, Any] | None = None
    created_at: float | None = None
    updated_at: float | None = None
    ended_at: float | None = None
    steps: Mapping[str, StepState] = field(default_factory=dict)
    error: Mapping[str, Any] | None = None
    heartbeat_age_s: float | None = None
    cancel_requested: bool = False
    definition: Mapping[str, Any] = field(default_factory=dict)
    host: str | None = None
    incarnation: str = ""

    @property
    def key(self) -> RunKey:
        """Which run this is. Not for a damaged one, whose definition may be what is damaged."""
        assert self.incarnation
        return RunKey(run_id=self.run_id, incarnation=self.incarnation)


def read_run(store: Store, run_id: str, *, progress: bool = True) -> RunState:
    """Read a run. Whether its driver lives is judged by the heartbeat's age against this machine's clock.

    Args:
        progress: read what the steps last reported too, a file for each step.

    Raises:
        UserError: RUN_ID_INVALID or RUN_UNKNOWN.
        VerlWorkflowError(JOURNAL_DAMAGED): names the file that is not as it was written.
    """
    while True:
        stored = read_definition(store, run_id)
        try:
            return _read(store, stored, with_progress=progress)
        except VerlWorkflowError as error:
            # Files are missing too when it is deleted while it is read; another one may have the id then.
            if error.code is not ErrorCode.JOURNAL_DAMAGED or bears(store, key_of(stored)):
                raise


def list_runs(store: Store, *, among: Collection[str] | None = None, unread: set[str] | None = None) -> list[RunState]:
    """All runs, sorted by id. One that cannot be read is there too, with status DAMAGED and the reason in `error`.

    Args:
        among: look at these folders alone. unread: takes in the folders that the storage fails to give; None: that is
            an error.
    """
    # A hidden folder is somebody's own: no run is called so.
    folders = [folder for folder in (store.folders("runs") if among is None else among) if not folder.startswith(".")]

    def look(folder: str) -> RunState | None:
        try:
            return _listed(store, folder)
        except VerlWorkflowError:
            if unread is None:
                raise
            unread.add(folder)
            return None

    if store.local_path is not None:
        found = [look(folder) for folder in folders]
    else:
        # From afar each takes several requests of tens of milliseconds.
        with ThreadPoolExecutor(_AT_A_TIME) as pool:
            found = list(pool.map(look, folders))
    return [state for state in found if state is not None]


def _listed(store: Store, folder: str) -> RunState | None:
    run_id = folder
    try:
        stored = parse_definition(store, f"runs/{folder}/definition.json")
        if stored is None:
            # A folder without a definition: files of a run that was never recorded.
            return None
        if path_part(stored["run_id"]) != folder:
            raise foreign(f"runs/{folder}/definition.json", stored["run_id"])
        run_id = stored["run_id"]
        return _read(store, stored, with_progress=False)
    except VerlWorkflowError as error:
        if error.code is not ErrorCode.JOURNAL_DAMAGED:
            raise
        if store.get(f"runs/{folder}/definition.json") is None:
            # Deleted while it was read.
            return None
        return RunState(run_id=run_id, status=RunStatus.DAMAGED, error=error.to_json())


def request_cancel(store: Store, run_id: str) -> RunState:
    """Ask a run to stop; it is CANCELLED when its driver has stopped all steps, or at once when it has no driver.

    Raises:
        UserError: RUN_ID_INVALID, RUN_UNKNOWN, or RUN_TERMINAL when the run has succeeded or failed already. To cancel
            a cancelled run is no error.
    """
    state = read_run(store, run_id)
    if state.status is RunStatus.CANCELLED:
        return state
    refuse_ended(state.status, run_id)
    journal = Journal(store, state.key)
    journal.read()
    journal.request(CancelRequested(by=this_process()))
    # The request may have been numbered behind the run's end.
    refuse_ended(journal.state.status, run_id)
    if state.status is not RunStatus.RUNNING and journal.state.status is not RunStatus.CANCELLED:
        # Safe even if a driver is alive after all: it is fenced, and stops its steps.
        claim = Claimed(owner=this_process(), steps=list(state.steps))
        if journal.claim(claim):
            journal.append(RunCancelled())
    return read_run(store, run_id)


def load_value(store: Store, committed: StepSucceeded) -> Any:
    """The value behind a commit, None when it was not kept. Raises VerlWorkflowError(JOURNAL_DAMAGED) when its digest
    differs, or when it cannot be loaded.
    """
    value = committed.value
    return None if value is None else value.load(store, committed.step)


def read_steps(store: Store, run: RunKey) -> Folded:
    """A run's journal, with what it takes over if it is a fork that nobody has driven yet."""
    folded = Journal(store, run).read()
    return folded.seeded(seed_of(read_definition(store, run.run_id))) if folded.untouched else folded


def read_graph(store: Store, key: str, sha256: str) -> Graph:
    """A graph by what a record says of it. Raises VerlWorkflowError(JOURNAL_DAMAGED) when it is not that one."""
    data = store.get(key)
    if data is None:
        raise damaged(key, "a graph of steps is missing")
    if hashlib.sha256(data).hexdigest() != sha256:
        raise damaged(key, "it is not the graph of steps that was recorded")
    return Graph.from_bytes(data, key)


def _read(store: Store, stored: Mapping[str, Any], *, with_progress: bool) -> RunState:
    key = key_of(stored)
    seed = seed_of(stored)
    journal = Journal(store, key)
    folded = journal.read()
    created_at = float(stored["created_at"])
    status, age = _liveness(store, key, folded, stored)
    known = -1
    while status is RunStatus.RESUMABLE and known < journal.length:
        # Its driver may have ended it, and be gone for that reason, after the journal was read.
        known = journal.length
        folded = journal.read()
        status, age = _liveness(store, key, folded, stored)
    host = stored.get("host")
    if status is RunStatus.PENDING and is_given_up(store, key):
        status = RunStatus.RESUMABLE
    if status in {RunStatus.PENDING, RunStatus.RESUMABLE, RunStatus.FAILED}:
        turn = waiting_turn(store, key, folded.epoch)
        if turn is not None:
            status, host = RunStatus.PENDING, turn.host
    return RunState(
        run_id=key.run_id,
        incarnation=key.incarnation,
        status=status,
        epoch=folded.epoch,
        owner=folded.owner,
        created_at=created_at,
        updated_at=folded.updated_at or created_at,
        ended_at=folded.ended_at,
        steps={name: _step(store, key, name, step, with_progress) for name, step in folded.seeded(seed).steps.items()},
        error=folded.error,
        heartbeat_age_s=age,
        cancel_requested=folded.cancel_requested,
        definition=stored["definition"],
        host=host,
    )


def _step(store: Store, key: RunKey, name: str, step: FoldedStep, with_progress: bool) -> StepState:
    progress = None
    if with_progress and step.attempts:
        progress = _progress(store, key, name, step.attempts[-1].number)
    return StepState(
        name=name,
        status=step.status,
        attempts=tuple(step.attempts),
        progress=progress,
        reused_from=step.committed.reused_from if step.committed else None,
        continued_to=step.continued.steps[-1] if step.continued else None,
        continued_steps=tuple(step.continued.steps) if step.continued else (),
        code=step.code,
        committed=step.committed,
        store=store,
    )


def _progress(store: Store, key: RunKey, name: str, attempt: int) -> Mapping[str, Any] | None:
    found = read_progress(store, key, name)
    return found.facts if found is not None and found.attempt == attempt else None


def _liveness(store: Store, key: RunKey, folded: Folded, stored: Mapping[str, Any]) -> tuple[RunStatus, float | None]:
    heartbeat = read_heartbeat(store, key)
    seen = heartbeat.get("time") if heartbeat else None
    age = max(0.0, time.time() - seen) if isinstance(seen, int | float) else None
    if folded.status in TERMINAL_STATES:
        return folded.status, age
    if folded.owner is None:
        expected = time.time() - stored["created_at"] < LEASE_S or is_alive(store, stored.get("host"))
        return (RunStatus.PENDING if expected else RunStatus.RESUMABLE), age
    silent = time.time() - (folded.claimed_at or 0.0)
    if heartbeat is not None and heartbeat.get("epoch") == folded.epoch and age is not None:
        silent = min(silent, age)
    gone = silent >= LEASE_S or known_gone(heartbeat, folded.owner, folded.epoch)
    return (RunStatus.RESUMABLE if gone else RunStatus.RUNNING), age


def refuse_ended(status: RunStatus, run_id: str) -> None:
    """Raise UserError(RUN_TERMINAL) when there is nothing to cancel, for the run has succeeded or failed."""
    if status in _ENDINGS:
        raise UserError(
            ErrorCode.RUN_TERMINAL,
            f"the run has ended already: it {_ENDINGS[status]}",
            where=run_id,
            remedy="Nothing is left to stop.",
        )


_ENDINGS = {
    RunStatus.SUCCEEDED: "has succeeded",
    RunStatus.FAILED: "has failed",
}
