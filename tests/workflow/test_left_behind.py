"""What a rebuilt host takes up, by what lies in the storage."""

from __future__ import annotations

from _pieces import described

from verl_workflow.storage import Store
from verl_workflow.workflow import RunStatus, create_run, read_run
from verl_workflow.workflow._host_life import HostLife
from verl_workflow.workflow._left_behind import left_behind
from verl_workflow.workflow._turn import Turn, give_up, record_turn


def taken_up(store: Store, host: str) -> list[str]:
    return [order.run_id for order in left_behind(store, host, ["w"], set())]


def test_a_new_workflow_belongs_to_the_host_that_has_taken_it_up_last(store: Store) -> None:
    for host in ("h1", "h2"):
        HostLife(store, host)._write()
    run = create_run(store, "w", described(), host="h1", seed=[])
    assert (taken_up(store, "h1"), taken_up(store, "h2")) == (["w"], [])
    give_up(store, run, "h1")
    assert read_run(store, "w").status is RunStatus.RESUMABLE
    record_turn(store, run, Turn(host="h2", epoch=0))
    state = read_run(store, "w")
    assert (state.status, state.host) == (RunStatus.PENDING, "h2")
    assert (taken_up(store, "h1"), taken_up(store, "h2")) == ([], ["w"])


def test_it_goes_on_in_the_environment_of_the_job_that_wished_so_last(store: Store) -> None:
    HostLife(store, "h")._write()
    run = create_run(store, "w", described(), host="h", seed=[], runtime_env={"env_vars": {"A": "1"}})
    [order] = left_behind(store, "h", ["w"], set())
    assert order.caller.runtime_env == {"env_vars": {"A": "1"}}
    record_turn(store, run, Turn(host="h", epoch=0, runtime_env={"env_vars": {"A": "2"}}))
    [order] = left_behind(store, "h", ["w"], set())
    assert order.caller.runtime_env == {"env_vars": {"A": "2"}}
