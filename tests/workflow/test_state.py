from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from _pieces import IMPATIENT, diamond, drive

from verl_workflow.errors import ErrorCode, UserError, VerlWorkflowError
from verl_workflow.storage import Store
from verl_workflow.workflow import (
    Plan,
    RunStatus,
    Step,
    StepContext,
    create_run,
    list_runs,
    read_run,
    request_cancel,
    this_process,
)
from verl_workflow.workflow._definition import run_key
from verl_workflow.workflow._heartbeat import heartbeat_key
from verl_workflow.workflow._owner import is_dead
from verl_workflow.workflow._records import StepSucceeded
from verl_workflow.workflow._state import load_value


@pytest.mark.parametrize("run_id", ["", ".", "..", "x" * 201, "a\0b", "half \ud800"])
def test_an_id_that_cannot_be_one_is_refused_by_name_and_nothing_is_written(tmp_path: Path, run_id: str) -> None:
    store = Store(str(tmp_path / "storage"))
    for call in (lambda: create_run(store, run_id, {}), lambda: read_run(store, run_id)):
        with pytest.raises(UserError) as caught:
            call()
        assert caught.value.code is ErrorCode.RUN_ID_INVALID
    assert list(tmp_path.iterdir()) == []


ODD_IDS = [
    "../x",
    "a/b",
    ".hidden",
    "a..b",
    "tab\t",
    "näme",
    "a\n",
    "=2F",
    "a=",
    "夜" * 200,
    "x" * 200,
    "C:\\con",
    "%2F",
]


def test_an_id_of_any_text_is_stored_inside_of_the_storage(tmp_path: Path) -> None:
    store = Store(str(tmp_path / "storage"))
    for run_id in ODD_IDS:
        create_run(store, run_id, {"id": run_id})
    assert [path.name for path in tmp_path.iterdir()] == ["storage"]
    assert len(list((tmp_path / "storage" / "runs").iterdir())) == len(ODD_IDS)
    assert {state.run_id for state in list_runs(store)} == set(ODD_IDS)
    assert all(read_run(store, run_id).definition == {"id": run_id} for run_id in ODD_IDS)


def test_a_run_is_created_once(store: Store) -> None:
    create_run(store, "r", {"first": True})
    with pytest.raises(UserError) as caught:
        create_run(store, "r", {"first": False})
    assert caught.value.code is ErrorCode.RUN_EXISTS
    assert read_run(store, "r").definition == {"first": True}


def test_a_record_whose_answer_got_lost_is_known_as_ones_own(store: Store) -> None:
    class Deaf(Store):
        def create(self, key: str, data: bytes) -> bool:
            # As S3's client sees it: written, the answer lost, asked again, refused.
            return super().create(key, data) and False

    key = create_run(Deaf(store.uri), "r", {"first": True})
    assert run_key(store, "r") == key
    with pytest.raises(UserError) as caught:
        create_run(Deaf(store.uri), "r", {"first": True})
    assert caught.value.code is ErrorCode.RUN_EXISTS


def test_an_unknown_run_is_told_with_the_nearest_id_and_nothing_is_written(store: Store) -> None:
    create_run(store, "tuesday-night", {})
    before = store.list("")
    for call in (read_run, request_cancel):
        with pytest.raises(UserError, match="Did you mean tuesday-night") as caught:
            call(store, "tuesday-nite")
        assert caught.value.code is ErrorCode.RUN_UNKNOWN
    assert store.list("") == before


def test_a_new_run_is_pending_and_becomes_resumable_when_nobody_takes_it(store: Store) -> None:
    create_run(store, "r", {})
    assert read_run(store, "r").status is RunStatus.PENDING
    stored = json.loads(store.get("runs/r/definition.json") or b"")
    store.put("runs/r/definition.json", json.dumps({**stored, "created_at": time.time() - 60}).encode())
    assert read_run(store, "r").status is RunStatus.RESUMABLE


def as_entry(store: Store, record: dict[str, object]) -> bytes:
    """A journal file of one event of the run ``r``, from its head and body in one."""
    head = {name: record[name] for name in ("seq", "epoch", "time") if name in record}
    body = {name: value for name, value in record.items() if name not in head}
    return json.dumps({"run": run_key(store, "r").incarnation, **head, "events": [body]}).encode()


def claimed_by(store: Store, owner: dict[str, object], *, beat_s_ago: float) -> None:
    create_run(store, "r", {})
    at = time.time() - 60
    record = {"kind": "claimed", "seq": 0, "epoch": 1, "time": at, "owner": owner, "steps": ["a"]}
    store.put(f"{run_key(store, 'r').folder}/journal/000000000000.json", as_entry(store, record))
    beat = {"epoch": 1, "owner": owner, "time": time.time() - beat_s_ago, "n": 1, "released": False}
    store.put(heartbeat_key(run_key(store, "r")), json.dumps(beat).encode())


def test_a_driver_that_shows_signs_of_life_is_running(store: Store) -> None:
    claimed_by(store, this_process(), beat_s_ago=1.0)
    state = read_run(store, "r")
    assert state.status is RunStatus.RUNNING
    assert state.heartbeat_age_s is not None
    assert 1.0 <= state.heartbeat_age_s < 15.0
    assert state.owner is not None
    assert state.owner["pid"] == os.getpid()


def test_a_silent_driver_of_another_host_is_given_up(store: Store) -> None:
    claimed_by(store, {**this_process(), "host": "elsewhere"}, beat_s_ago=16.0)
    assert read_run(store, "r").status is RunStatus.RESUMABLE


def test_a_driver_whose_process_on_this_host_is_dead_is_given_up_at_once(store: Store) -> None:
    child = subprocess.run(
        [sys.executable, "-c", "import json; from verl_workflow.workflow import *; print(json.dumps(this_process()))"],
        check=True,
        capture_output=True,
    )
    claimed_by(store, json.loads(child.stdout), beat_s_ago=0.0)
    assert read_run(store, "r").status is RunStatus.RESUMABLE


def test_a_process_counts_as_dead_only_where_that_can_be_seen() -> None:
    here = this_process()
    gone = {**here, "started": here["started"] - 1}
    assert not is_dead(here)
    assert is_dead(gone)
    for place in ({"host": "elsewhere"}, {"boot": "another"}, {"pids": "pid:[1]"}, {"pid": None}, {"started": None}):
        assert not is_dead({**gone, **place})
    assert not is_dead({})


def test_a_driver_that_has_stopped_by_itself_is_not_waited_for(store: Store, marks: Path) -> None:
    create_run(store, "r", {})
    plan = diamond(marks)

    class Full(Store):
        def put(self, key: str, data: bytes) -> None:
            if "/values/d-" in key:
                raise VerlWorkflowError(ErrorCode.STORAGE, "full")
            super().put(key, data)

    with pytest.raises(VerlWorkflowError, match="full"):
        drive(Full(store.uri), "r", plan)
    assert read_run(store, "r").status is RunStatus.RESUMABLE
    assert drive(store, "r", plan, lease_s=3600.0).status is RunStatus.SUCCEEDED


DAMAGES = {
    "truncated": lambda data: data[: len(data) // 2],
    "empty": lambda data: b"",
    "foreign": lambda data: b'{"hello": "world"}',
    "of a later version": lambda data: data.replace(b'"step_started"', b'"step_paused"'),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_record_is_named_and_stops_that_run_only(store: Store, marks: Path, damage: str) -> None:
    for run_id in ("a", "b", "c"):
        create_run(store, run_id, {})
        drive(store, run_id, diamond(marks))
    key = f"{run_key(store, 'b').folder}/journal/000000000001.json"
    store.put(key, DAMAGES[damage](store.get(key)))
    with pytest.raises(VerlWorkflowError) as caught:
        read_run(store, "b")
    assert caught.value.code is ErrorCode.JOURNAL_DAMAGED
    assert caught.value.where == key
    assert "Restore" in str(caught.value)
    found = {state.run_id: state for state in list_runs(store)}
    assert [state.status.value for state in found.values()] == ["succeeded", "damaged", "succeeded"]
    assert key in str(found["b"].error)


def test_a_missing_record_is_named(store: Store, marks: Path) -> None:
    create_run(store, "r", {})
    drive(store, "r", diamond(marks))
    store.delete(f"{run_key(store, 'r').folder}/journal/000000000003.json")
    with pytest.raises(VerlWorkflowError, match=r"000000000003\.json"):
        read_run(store, "r")


@pytest.mark.parametrize("damage", [b"11", b"", None])
def test_a_value_that_is_not_the_recorded_one_is_never_used(store: Store, marks: Path, damage: bytes | None) -> None:
    create_run(store, "r", {})
    drive(store, "r", diamond(marks))
    state = read_run(store, "r")
    committed = state.steps["d"].committed
    assert committed is not None
    store.delete(committed.value_key) if damage is None else store.put(committed.value_key, damage)
    assert state.steps["c"].value == 4
    with pytest.raises(VerlWorkflowError) as caught:
        _ = read_run(store, "r").steps["d"].value
    assert caught.value.code is ErrorCode.JOURNAL_DAMAGED
    assert committed.value_key in str(caught.value)


def test_a_damaged_definition_is_named(store: Store) -> None:
    create_run(store, "r", {})
    store.put("runs/r/definition.json", b"{")
    with pytest.raises(VerlWorkflowError, match=r"runs/r/definition.json"):
        read_run(store, "r")
    assert list_runs(store)[0].status is RunStatus.DAMAGED


def test_folders_that_are_no_runs_are_not_listed(store: Store) -> None:
    create_run(store, "r", {})
    store.put("runs/leftover/artifacts/x", b"")
    store.put("runs/.trash/definition.json", b"{}")
    assert [state.run_id for state in list_runs(store)] == ["r"]


def test_reading_runs_needs_no_ray() -> None:
    code = "import sys; import verl_workflow.workflow; sys.exit(any(m in sys.modules for m in ('ray', 'torch')))"
    subprocess.run([sys.executable, "-c", code], check=True)


DEEP = b"[" * 100_000


@pytest.mark.parametrize(
    "data",
    [b"", b"[]", b"\xff", DEEP, b'{"definition": []}']
    + [
        json.dumps({"definition": {}, "created_at": at}).encode()
        for at in ("yesterday", None, True, 1e300, float("nan"), -1.0)
    ],
)
def test_a_definition_that_is_not_as_it_was_written_is_named_and_the_other_runs_are_listed(
    store: Store, data: bytes
) -> None:
    create_run(store, "bad", {})
    create_run(store, "good", {})
    store.put("runs/bad/definition.json", data)
    with pytest.raises(VerlWorkflowError, match=r"runs/bad/definition\.json") as caught:
        read_run(store, "bad")
    assert caught.value.code is ErrorCode.JOURNAL_DAMAGED
    assert {state.run_id: state.status for state in list_runs(store)} == {
        "bad": RunStatus.DAMAGED,
        "good": RunStatus.PENDING,
    }


CLAIM = {"kind": "claimed", "seq": 0, "epoch": 1, "time": 1.0, "owner": {}, "steps": ["a"]}
DONE = {"kind": "step_succeeded", "seq": 1, "epoch": 1, "time": 2.0, "step": "a", "attempt": 0, "sha256": "0"}


@pytest.mark.parametrize(
    "entry",
    [
        DEEP,
        {**CLAIM, "steps": [1, None]},
        {**CLAIM, "steps": ["a", ""]},
        {**CLAIM, "kind": ["claimed"]},
        *({**CLAIM, "time": at} for at in (1e308, float("nan"), True, -1.0)),
    ],
)
def test_a_journal_entry_that_cannot_be_read_is_named(store: Store, entry: bytes | dict[str, object]) -> None:
    create_run(store, "r", {})
    data = entry if isinstance(entry, bytes) else as_entry(store, entry)
    store.put(f"{run_key(store, 'r').folder}/journal/000000000000.json", data)
    with pytest.raises(VerlWorkflowError, match=r"runs/r/[0-9a-f]{16}/journal/000000000000\.json") as caught:
        read_run(store, "r")
    assert caught.value.code is ErrorCode.JOURNAL_DAMAGED


@pytest.mark.parametrize(
    "change",
    [
        *({"value_key": key} for key in ("../../../etc/passwd", "", "/etc", "runs//a", "runs/./a", "runs/..")),
    ],
)
def test_a_journal_entry_that_leads_elsewhere_is_named(store: Store, change: dict[str, str]) -> None:
    create_run(store, "r", {})
    for entry in (CLAIM, {**DONE, "value_key": "runs/r/values/a", **change}):
        store.put(f"{run_key(store, 'r').folder}/journal/{entry['seq']:012}.json", as_entry(store, entry))
    with pytest.raises(VerlWorkflowError, match=f"its {next(iter(change))} is ") as caught:
        read_run(store, "r")
    assert (caught.value.code, caught.value.where) == (
        ErrorCode.JOURNAL_DAMAGED,
        f"{run_key(store, 'r').folder}/journal/000000000001.json",
    )


@pytest.mark.parametrize(
    "beat", [b"", b"[]", b"\xff", DEEP, b'{"epoch": "y", "time": 1}', b'{"epoch": 1, "time": NaN}']
)
def test_a_heartbeat_that_cannot_be_read_is_none(store: Store, beat: bytes) -> None:
    claimed_by(store, this_process(), beat_s_ago=1.0)
    store.put(heartbeat_key(run_key(store, "r")), beat)
    assert read_run(store, "r").heartbeat_age_s is None


@pytest.mark.parametrize("progress", [b"", b"[]", b"\xff", DEEP])
def test_progress_that_cannot_be_read_is_none(store: Store, progress: bytes) -> None:
    claimed_by(store, this_process(), beat_s_ago=1.0)
    started = {"kind": "step_started", "seq": 1, "epoch": 1, "time": time.time(), "step": "a", "attempt": 1}
    store.put(f"{run_key(store, 'r').folder}/journal/000000000001.json", as_entry(store, started))
    store.put(f"{run_key(store, 'r').folder}/progress/a.json", progress)
    assert read_run(store, "r").steps["a"].progress is None


def test_a_value_nested_too_deeply_to_be_read_is_named(store: Store) -> None:
    committed = StepSucceeded(step="a", attempt=1, value_key="runs/r/values/a", sha256=hashlib.sha256(DEEP).hexdigest())
    store.put(committed.value_key, DEEP)
    with pytest.raises(VerlWorkflowError, match="nested too deeply") as caught:
        load_value(store, committed)
    assert caught.value.where == committed.value_key


def test_a_run_that_ends_while_it_is_read_is_not_taken_for_one_that_nobody_runs(store: Store) -> None:
    begun, go = threading.Event(), threading.Event()

    def wait(context: StepContext) -> int:
        begun.set()
        go.wait(30)
        return 1

    create_run(store, "r", {})
    plan = Plan(steps=(Step(name="a", call=wait, retry=IMPATIENT),))
    driver = threading.Thread(target=drive, args=(store, "r", plan))
    driver.start()
    assert begun.wait(30)

    class LooksLate(Store):
        """The driver ends the run, and says that it is gone, before its heartbeat is read."""

        def get(self, key: str) -> bytes | None:
            if key == heartbeat_key(run_key(store, "r")):
                go.set()
                driver.join()
            return super().get(key)

    assert read_run(LooksLate(store.uri), "r").status is RunStatus.SUCCEEDED


def test_a_record_of_another_run_is_damage_and_not_taken_for_its_own(store: Store, marks: Path) -> None:
    for run_id in ("a", "b"):
        create_run(store, run_id, {})
        drive(store, run_id, diamond(marks))
    last = store.list(f"{run_key(store, 'a').folder}/journal")[-1]
    whole = store.get(last) or b""
    store.put(last, store.get(store.list(f"{run_key(store, 'b').folder}/journal")[-1]) or b"")
    with pytest.raises(VerlWorkflowError, match="it belongs to the run") as caught:
        read_run(store, "a")
    assert (caught.value.code, caught.value.where) == (ErrorCode.JOURNAL_DAMAGED, last)
    store.put(last, whole)

    store.put("runs/b/definition.json", store.get("runs/a/definition.json") or b"")
    for look in (read_run, request_cancel):
        with pytest.raises(VerlWorkflowError, match="it is that of the run 'a'") as caught:
            look(store, "b")
        assert caught.value.code is ErrorCode.JOURNAL_DAMAGED
    assert [(state.run_id, state.status.value) for state in list_runs(store)] == [("a", "succeeded"), ("b", "damaged")]
