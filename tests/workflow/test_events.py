"""Events from outside: kept once and for good, over the storage and over HTTP."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from _pieces import Crash, CrashingStore, journal, of_kind
from _workflows import drive_workflow, record

from verl_workflow import workflow
from verl_workflow.errors import ErrorCode, UserError, VerlWorkflowError
from verl_workflow.storage import Store
from verl_workflow.workflow import RunState, RunStatus, WorkflowNotFoundError, read_run
from verl_workflow.workflow._definition import run_key
from verl_workflow.workflow._http_events import event_app
from verl_workflow.workflow._sent_events import read_event, store_event

PATIENCE_S = 120.0


@pytest.fixture(params=["disk", "s3"])
def any_store(request: pytest.FixtureRequest, tmp_path: Path) -> Store:
    if request.param == "s3":
        return Store(request.getfixturevalue("s3_uri"))
    return Store(str(tmp_path / "storage"))


def waiting(*args: Any, listener: Any = workflow.StorageListener) -> Any:
    return workflow.wait_for_event(listener, *args)


def in_background(store: Store, workflow_id: str) -> tuple[threading.Thread, list[RunState]]:
    found: list[RunState] = []
    thread = threading.Thread(target=lambda: found.append(drive_workflow(store, workflow_id)), daemon=True)
    thread.start()
    return thread, found


def value_of(state: RunState) -> Any:
    assert state.status is RunStatus.SUCCEEDED, state.error
    return state.steps["workflow.message_committed"].value


def refusal(*arguments: Any) -> ErrorCode:
    with pytest.raises(UserError) as caught:
        store_event(*arguments)
    return caught.value.code


def test_an_event_is_kept_once_and_never_changes(any_store: Store) -> None:
    record(any_store, "w", waiting())
    record(any_store, "other/w", waiting())
    assert store_event(any_store, "w", "k", {"n": [1, None]}) is True
    before = any_store.list("")
    assert store_event(any_store, "w", "k", {"n": [1, None]}) is False
    assert refusal(any_store, "w", "k", {"n": [2, None]}) is ErrorCode.EVENT_CONFLICT
    assert refusal(any_store, "w", "k", {"n": [True, None]}) is ErrorCode.EVENT_CONFLICT
    assert any_store.list("") == before
    # The same key of another workflow is another event.
    assert store_event(any_store, "other/w", "k", 7) is True
    first, second = (read_event(any_store, run_key(any_store, each), "k") for each in ("w", "other/w"))
    assert first is not None
    assert second is not None
    assert (first.payload, second.payload) == ({"n": [1, None]}, 7)


def test_what_cannot_be_an_event_is_refused_and_nothing_written(store: Store, tmp_path: Path) -> None:
    assert refusal(store, "nope", "k", 1) is ErrorCode.RUN_UNKNOWN
    assert list(tmp_path.iterdir()) == []
    record(store, "w", waiting())
    before = store.list("")
    for key in ("", "x" * 201, "a\0b", ".."):
        assert refusal(store, "w", key, 1) is ErrorCode.USAGE_INVALID
    for payload in (float("nan"), {1, 2}, object()):
        assert refusal(store, "w", "k", payload) is ErrorCode.DATA_INVALID
    assert store.list("") == before


def test_of_racing_senders_one_is_heard(store: Store) -> None:
    record(store, "w", waiting())
    outcomes: list[Any] = []

    def send(number: int) -> None:
        try:
            outcomes.append((number, store_event(store, "w", "k", number)))
        except UserError as error:
            outcomes.append((number, error.code))

    threads = [threading.Thread(target=send, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    winners = [number for number, outcome in outcomes if outcome is True]
    assert len(winners) == 1
    assert [outcome for _, outcome in outcomes].count(ErrorCode.EVENT_CONFLICT) == 7
    found = read_event(store, run_key(store, "w"), "k")
    assert found is not None
    assert found.payload == winners[0]


def test_an_early_event_waits_for_its_workflow(store: Store) -> None:
    record(store, "w", waiting("early/key"))
    store_event(store, "w", "early/key", "payload")
    assert value_of(drive_workflow(store, "w")) == ("early/key", "payload")


def test_a_workflow_waits_for_an_event_of_its_own(store: Store) -> None:
    record(store, "w", waiting("k", listener=workflow.HTTPListener))
    record(store, "other", waiting("k"))
    thread, found = in_background(store, "w")
    store_event(store, "other", "k", "not for it")
    time.sleep(0.5)
    assert thread.is_alive()
    store_event(store, "w", "k", [1])
    thread.join(PATIENCE_S)
    assert value_of(found[0]) == ("k", [1])


def test_the_key_is_by_default_the_id_of_the_task_that_waits(store: Store) -> None:
    record(store, "w", waiting())
    store_event(store, "w", "workflow.get_message", 1)
    assert value_of(drive_workflow(store, "w")) == ("workflow.get_message", 1)


def test_a_key_may_come_from_another_step(store: Store) -> None:
    import ray

    record(store, "w", waiting(ray.remote(lambda: "made").options(**workflow.options(task_id="key")).bind()))
    store_event(store, "w", "made", 2)
    assert value_of(drive_workflow(store, "w")) == ("made", 2)


def test_a_driver_may_die_at_any_write_and_the_event_is_committed_once(tmp_path: Path) -> None:
    at = 0
    while True:
        at += 1
        uri = str(tmp_path / f"{at}")
        store = Store(uri)
        record(store, "w", waiting("k"))
        store_event(store, "w", "k", "once")
        crashing = CrashingStore(uri, at=at, after=at % 2 == 0)
        try:
            drive_workflow(crashing, "w")
        except Crash:
            left = read_run(store, "w")
            assert value_of(left if left.ended_at else drive_workflow(store, "w")) == ("k", "once")
        else:
            break
        kept = [each["step"] for each in of_kind(journal(store, "w"), "step_succeeded")]
        assert kept == ["workflow.get_message", "workflow.message_committed"]
    assert at > 4


def test_a_storage_that_is_away_for_a_moment_fails_no_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = Store(str(tmp_path / "storage"))
    record(store, "w", waiting("k"))
    store_event(store, "w", "k", 1)
    failures = iter([True, True])
    real = Store.get

    def get(self: Store, key: str) -> bytes | None:
        if "/events/" in key and next(failures, False):
            raise VerlWorkflowError(ErrorCode.STORAGE, "away", retryable=True)
        return real(self, key)

    monkeypatch.setattr(Store, "get", get)
    state = drive_workflow(store, "w")
    assert value_of(state) == ("k", 1)
    assert len(state.steps["workflow.get_message"].attempts) == 1


def test_a_torn_event_is_told(store: Store) -> None:
    record(store, "w", waiting("k"))
    key = f"{run_key(store, 'w').folder}/events/k.json"
    store.put(key, b'{"event_key": "k"')
    state = drive_workflow(store, "w")
    assert state.status is RunStatus.FAILED
    assert key in (state.error or {})["message"]


def test_the_api_sends_to_the_storage_it_was_given(store: Store) -> None:
    record(store, "w", waiting("k"))
    workflow.init(storage=store.uri)
    workflow.send_event("w", "k", 1)
    workflow.send_event("w", "k", 1)
    with pytest.raises(UserError, match="does not change"):
        workflow.send_event("w", "k", 2)
    with pytest.raises(WorkflowNotFoundError):
        workflow.send_event("nope", "k", 1)
    assert value_of(drive_workflow(store, "w")) == ("k", 1)


BODIES: list[tuple[str, bytes, int]] = [
    ("w", b'{"event_key": "k", "event_payload": {"n": 1}}', 200),
    ("w", b'{"event_payload": {"n": 1}, "event_key": "k"}', 200),
    ("w", b'{"event_key": "k", "event_payload": {"n": 2}}', 409),
    ("a%2Fb", b'{"event_key": "k", "event_payload": null}', 200),
    ("nope", b'{"event_key": "k", "event_payload": 1}', 404),
    ("..%00", b'{"event_key": "k", "event_payload": 1}', 404),
    ("w", b"", 400),
    ("w", b"{", 400),
    ("w", b"\xff", 400),
    ("w", b"[" * 100_000, 400),
    ("w", b'["k", 1]', 400),
    ("w", b'{"event_key": "l"}', 400),
    ("w", b'{"event_key": 1, "event_payload": 1}', 400),
    ("w", b'{"event_key": "", "event_payload": 1}', 400),
    ("w", b'{"event_key": "l", "event_payload": NaN}', 400),
]


async def answers(app: Any) -> list[int]:
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://door") as client:
        return [(await client.post(f"/send_event/{where}", content=body)).status_code for where, body, _ in BODIES]


def test_the_door_answers_each_body_with_its_code(store: Store) -> None:
    for workflow_id in ("w", "a/b"):
        record(store, workflow_id, waiting("k"))
    assert asyncio.run(answers(event_app(store))) == [code for _, _, code in BODIES]
    assert [key.rsplit("/", 2)[-2:] for key in store.list("runs") if "/events/" in key] == [["events", "k.json"]] * 2
    assert value_of(drive_workflow(store, "w")) == ("k", {"n": 1})


def test_the_door_says_when_the_storage_fails(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    record(store, "w", waiting("k"))

    def refuses(self: Store, key: str, data: bytes) -> bool:
        raise VerlWorkflowError(ErrorCode.STORAGE, "full", retryable=True)

    monkeypatch.setattr(Store, "create", refuses)

    async def answer() -> httpx.Response:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(event_app(store)), base_url="http://door") as client:
            return await client.post("/send_event/w", content=b'{"event_key": "k", "event_payload": 1}')

    shown = asyncio.run(answer())
    assert (shown.status_code, shown.json()["error"]["code"]) == (503, "storage")


@pytest.fixture
def door(store: Store, ray_cluster: Any) -> Iterator[str]:
    """The address of the application on real Serve."""
    pytest.importorskip("ray.serve", reason="the extra serve is not installed", exc_type=ImportError)
    from ray import serve

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    workflow.init(storage=store.uri)
    try:
        yield workflow.serve_events(port=port)
    finally:
        serve.shutdown()


@pytest.mark.timeout(300)
def test_a_workflow_on_ray_gets_its_event_through_serve(store: Store, door: str) -> None:
    reference = workflow.run_async(waiting("k", listener=workflow.HTTPListener), workflow_id="a/b")
    deadline = time.monotonic() + PATIENCE_S
    while not any(step.attempts for step in read_run(store, "a/b").steps.values()):
        assert time.monotonic() < deadline
        time.sleep(0.1)
    body = {"event_key": "k", "event_payload": {"by": "http"}}
    assert door.startswith("http://127.0.0.1:")
    sent = httpx.post(f"{door}/send_event/a%2Fb", json=body, timeout=60)
    assert (sent.status_code, sent.json()["new"]) == (200, True)
    assert httpx.post(f"{door}/send_event/a%2Fb", json=body, timeout=60).json()["new"] is False
    assert httpx.post(f"{door}/send_event/nope", json=body, timeout=60).status_code == 404
    assert httpx.post(f"{door}/send_event/a%2Fb", json={**body, "event_payload": 1}, timeout=60).status_code == 409
    assert httpx.post(f"{door}/send_event/a%2Fb", content="{", timeout=60).status_code == 400
    # The address that was asked for is the one it listens on, or the door stays shut.
    port = int(door.rsplit(":", 1)[1].split("/")[0])
    with pytest.raises(UserError, match=f"listens on 127.0.0.1:{port}"):
        workflow.serve_events(host="0.0.0.0", port=port)
    import ray

    assert ray.get(reference, timeout=PATIENCE_S) == ("k", {"by": "http"})
    assert json.loads(store.get(f"{run_key(store, 'a/b').folder}/events/k.json") or b"")["payload"] == {"by": "http"}
