"""How a driver becomes the owner of a run: by the next epoch in the journal, once the last owner is seen to be gone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from verl_workflow.errors import ErrorCode, UserError
from verl_workflow.storage import Store
from verl_workflow.workflow._fold import FINAL_STATES, Folded, RunStatus
from verl_workflow.workflow._heartbeat import LEASE_S, known_gone, read_heartbeat, seen_unchanged
from verl_workflow.workflow._journal import Journal
from verl_workflow.workflow._names import RunKey
from verl_workflow.workflow._records import Claimed, Event, StepsReset
from verl_workflow.workflow._state import RunState


def take_over(
    journal: Journal,
    store: Store,
    run: RunKey,
    *,
    owner: Mapping[str, Any],
    steps: Sequence[str],
    seed: Sequence[Event],
    reset: StepsReset | None,
    remedy: str,
    force: bool,
    lease_s: float,
) -> None:
    """Claim the run; the journal is then read to its end and may be written to.

    Args:
        seed: what a fork takes over: written with the first claim. reset: written with the claim, or not at all.
        remedy: what a user may do who finds that another driver has it.

    Raises:
        UserError: RUN_TERMINAL or RUN_OWNED; see `Driver.run`.
    """
    before = journal.read()
    while True:
        _refuse_ended(before, run.run_id)
        epoch = before.epoch
        last = before.owner if before.status is RunStatus.RUNNING and not force else None
        if last is not None and not is_gone(store, run, last, epoch, lease_s):
            raise _owned(run.run_id, last, remedy)
        more = [*(seed if before.untouched else ()), *([] if reset is None else [reset])]
        if journal.claim(Claimed(owner=dict(owner), steps=list(steps)), *more):
            return
        now = journal.read()
        _refuse_ended(now, run.run_id)
        if now.epoch != epoch or not force:
            raise _owned(run.run_id, now.owner or {}, remedy)
        before = now


def _refuse_ended(state: Folded, run_id: str) -> None:
    if state.status in FINAL_STATES:
        raise UserError(
            ErrorCode.RUN_TERMINAL,
            f"the run has ended already: {state.status.value}",
            where=run_id,
            remedy="Start a new run.",
        )


def refuse_driven(store: Store, state: RunState, remedy: str) -> None:
    """Raise UserError(RUN_OWNED) when the run's driver is alive, which takes `LEASE_S` at most to see.

    Args:
        remedy: what a user may do.
    """
    driven = state.status is RunStatus.RUNNING and state.owner is not None
    if driven and not is_gone(store, state.key, state.owner or {}, state.epoch):
        raise _owned(state.run_id, state.owner or {}, remedy)


def is_gone(store: Store, run: RunKey, owner: Mapping[str, Any], epoch: int, lease_s: float = LEASE_S) -> bool:
    """Whether the driver of `epoch` is gone; unless it said so, or has died on this machine, this takes `lease_s`.

    What clocks say is not asked: its heartbeat is watched.
    """
    return known_gone(read_heartbeat(store, run), owner, epoch) or seen_unchanged(store, run, lease_s)


def _owned(run_id: str, owner: Mapping[str, Any], remedy: str) -> UserError:
    return UserError(
        ErrorCode.RUN_OWNED,
        f"another driver runs it: process {owner.get('pid')} on {owner.get('host')}",
        where=run_id,
        remedy=remedy,
    )
