"""What an earlier process of a host was driving, or had in its queue."""

from __future__ import annotations

import time
from collections.abc import Collection
from typing import Any

from verl_workflow.errors import VerlWorkflowError
from verl_workflow.storage import Store
from verl_workflow.workflow._client import Caller
from verl_workflow.workflow._definition import read_definition
from verl_workflow.workflow._fold import RunStatus
from verl_workflow.workflow._names import path_part
from verl_workflow.workflow._places import Order
from verl_workflow.workflow._state import RunState, list_runs
from verl_workflow.workflow._turn import read_turn, waiting_turn


def left_behind(store: Store, token: str, folders: Collection[str], unread: set[str]) -> list[Order]:
    """The workflows among these folders that the host of this token has to go on with, in their order.

    Args:
        unread: takes in the folders that the storage does not give.
    """
    found: list[tuple[bool, float, Order]] = []
    for state in list_runs(store, among=folders, unread=unread):
        waiting = state.status is RunStatus.PENDING and state.host == token
        mine = state.owner is not None and state.owner.get("driver") == token
        if waiting or (mine and state.status in {RunStatus.RUNNING, RunStatus.RESUMABLE}):
            try:
                turn = waiting_turn(store, state.key, state.epoch)
                environment = _environment_of(store, token, state)
            except VerlWorkflowError:
                unread.add(path_part(state.run_id))
                continue
            # Its job may be over: whatever its workers have loaded is not trusted.
            order = Order(run=state.key, caller=Caller(job=token, runtime_env=environment), turn=turn)
            found.append((waiting, state.created_at or time.time(), order))
    return [order for _, _, order in sorted(found, key=lambda each: each[:2])]


def _environment_of(store: Store, token: str, state: RunState) -> dict[str, Any]:
    """That of the job whose wish it was that the workflow is driven, the last time."""
    turn = read_turn(store, state.key)
    if turn is not None and turn.host == token:
        return dict(turn.runtime_env)
    return dict(read_definition(store, state.run_id).get("runtime_env", {}))
