"""The same journal in S3, as moto's server speaks it."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from _pieces import Crash, CrashingStore, diamond, drive, executions, journal, of_kind

from verl_workflow.errors import FencedError, UserError, VerlWorkflowError
from verl_workflow.storage import Store
from verl_workflow.workflow import RunStatus, create_run, list_runs, read_run, request_cancel
from verl_workflow.workflow._definition import run_key
from verl_workflow.workflow._journal import Journal
from verl_workflow.workflow._records import Claimed, StepStarted


@pytest.fixture
def bucket(s3_uri: str) -> Store:
    return Store(s3_uri)


def test_a_run_dies_and_is_taken_up(bucket: Store, marks: Path) -> None:
    create_run(bucket, "r", {"x": 1})
    with pytest.raises(UserError):
        create_run(bucket, "r", {"x": 2})
    for write in (3, 6, 8):
        with pytest.raises(Crash):
            drive(CrashingStore(bucket.uri, at=write, after=write == 6), "r", diamond(marks))
    state = drive(bucket, "r", diamond(marks))
    assert state.status is RunStatus.SUCCEEDED
    assert {name: step.value for name, step in state.steps.items()} == {"a": 1, "b": 3, "c": 4, "d": 10}
    assert sorted(record["step"] for record in of_kind(journal(bucket, "r"), "step_succeeded")) == list("abcd")
    assert len(executions(marks, "d")) <= 2


def test_two_writers_are_told_apart(bucket: Store) -> None:
    key = create_run(bucket, "r", {})
    first, second = Journal(bucket, key), Journal(bucket, key)
    assert first.claim(Claimed(owner={"id": "1"}, steps=[]))
    assert not second.claim(Claimed(owner={"id": "2"}, steps=[]))
    second.read()
    assert second.claim(Claimed(owner={"id": "2"}, steps=[]))
    with pytest.raises(FencedError):
        first.append(StepStarted(step="a", attempt=1))


def _claim(uri: str, run_id: str, racer: str, barrier: threading.Barrier) -> str | None:
    log = Journal(Store(uri), run_key(Store(uri), run_id))
    barrier.wait(30)
    return racer if log.claim(Claimed(owner={"id": racer}, steps=[])) else None


def test_of_racing_claims_one_wins(bucket: Store) -> None:
    for number in range(10):
        barrier = threading.Barrier(6)
        create_run(bucket, f"race-{number}", {})
        with ThreadPoolExecutor(6) as pool:
            claims = [pool.submit(_claim, bucket.uri, f"race-{number}", str(racer), barrier) for racer in range(6)]
        assert [winner for claim in claims if (winner := claim.result())] == [
            record["owner"]["id"] for record in journal(bucket, f"race-{number}")
        ]


def test_damage_cancel_and_list_work_as_on_disk(bucket: Store, marks: Path) -> None:
    for run_id in ("a", "b", "c"):
        create_run(bucket, run_id, {})
    drive(bucket, "a", diamond(marks))
    bucket.put(f"{run_key(bucket, 'a').folder}/journal/000000000002.json", b"{")
    with pytest.raises(VerlWorkflowError, match=r"000000000002\.json"):
        read_run(bucket, "a")
    request_cancel(bucket, "b")
    assert [state.status.value for state in list_runs(bucket)] == ["damaged", "cancelled", "pending"]
