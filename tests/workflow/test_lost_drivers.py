"""What a driver makes of a run whose driver before it was lost."""

from __future__ import annotations

from pathlib import Path

from _graphs import node, output, record, run_graph

from verl_workflow.errors import ErrorCode, VerlWorkflowError
from verl_workflow.storage import Store
from verl_workflow.workflow import RetryPolicy, RunState, RunStatus
from verl_workflow.workflow._definition import run_key
from verl_workflow.workflow._journal import Journal
from verl_workflow.workflow._records import Claimed, StepFailed, StepsReset, StepStarted

ERROR = VerlWorkflowError(ErrorCode.STEP_FAILED, "ValueError: for good", where="bad").to_json()


def lost_after_a_failure(store: Store, folder: Path, **options: object) -> RunState:
    """A step has failed for good, and its driver is lost while it waits for the one beside it."""

    def bad() -> int:
        (folder / f"bad-{len(list(folder.iterdir()))}").touch()
        return 1

    def slow() -> int:
        return 2

    def both(one: int, other: int) -> int:
        return one + other

    graph = record(store, "r", node(both, node(bad, retry=RetryPolicy(attempts=1)), node(slow)))
    journal = Journal(store, run_key(store, "r"))
    journal.read()
    gone = {"id": "x", "host": "elsewhere", "pid": 1}
    assert journal.claim(Claimed(owner=gone, steps=["bad", "slow", "both"]))
    journal.append(StepStarted(step="bad", attempt=1), StepStarted(step="slow", attempt=1))
    journal.append(StepFailed(step="bad", attempt=1, error=ERROR, will_retry=False))
    first = run_graph(store, "r", graph, **options)
    if first.status is RunStatus.FAILED:
        assert not list(folder.iterdir())
        assert run_graph(store, "r", graph).status is RunStatus.SUCCEEDED
    return first


def test_a_step_that_failed_for_good_has_no_further_attempt_until_somebody_resumes(store: Store, marks: Path) -> None:
    state = lost_after_a_failure(store, marks)
    assert state.status is RunStatus.FAILED
    assert state.error is not None
    assert state.error["message"] == ERROR["message"]
    assert output(store, "r") == 3
    assert len(list(marks.iterdir())) == 1


def test_one_whose_code_was_changed_since_has(store: Store, marks: Path) -> None:
    state = lost_after_a_failure(store, marks, reset=StepsReset(steps=[], code={"bad": "1" * 64}))
    assert state.status is RunStatus.SUCCEEDED
