"""How a driver becomes the owner of a run: by the next epoch in the journal, once the last owner is seen to be gone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from verl_workflow.errors import ErrorCode, UserError
from verl_workflow.storage import Store
from verl_workflow.workflow._fold import FINAL_STATES, Folded, RunStatus
from verl_workflow.workflow._heartbeat import known_gone, read_heartbeat, seen_unchanged
from verl_workflow.workflow._journal import Journal
from verl_workflow.workflow._records import Claimed


def take_over(
    journal: Journal,
    store: Store,
    run_id: str,
    *,
    owner: Mapping[str, Any],
    steps: Sequence[str],
    force: bool,
    lease_s: float,
) -> None:
    """Claim the run; the journal is then read to its end and may be written to.

    Raises:
        UserError: RUN_TERMINAL or RUN_OWNED; see `Driver.run`.
    """
    before = journal.read()
    while True:
        _refuse_ended(before, run_id)
        epoch = before.epoch
        if before.owner is not None and before.status is RunStatus.RUNNING and not force:
            _await_gone(store, run_id, before, before.owner, lease_s)
        if journal.claim(Claimed(owner=dict(owner), steps=list(steps))):
            return
        now = journal.read()
        _refuse_ended(now, run_id)
        if now.epoch != epoch or not force:
            raise _owned(run_id, now.owner or {})
        before = now


def _refuse_ended(state: Folded, run_id: str) -> None:
    if state.status in FINAL_STATES:
        raise UserError(
            ErrorCode.RUN_TERMINAL,
            f"the run has ended already: {state.status.value}",
            where=run_id,
            remedy="Start a new run.",
        )


def _await_gone(store: Store, run_id: str, state: Folded, owner: Mapping[str, Any], lease_s: float) -> None:
    if known_gone(read_heartbeat(store, run_id), owner, state.epoch):
        return
    if not seen_unchanged(store, run_id, lease_s):
        raise _owned(run_id, owner)


def _owned(run_id: str, owner: Mapping[str, Any]) -> UserError:
    return UserError(
        ErrorCode.RUN_OWNED,
        f"another driver runs it: process {owner.get('pid')} on {owner.get('host')}",
        where=run_id,
        remedy="Wait for it to end, or take the run from it with --force.",
    )
