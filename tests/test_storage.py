from __future__ import annotations

import multiprocessing
import os
import pickle
from pathlib import Path

import pytest

from verl_workflow.errors import ErrorCode, UserError, VerlWorkflowError
from verl_workflow.storage import Store, absolute_uri


@pytest.fixture(params=["local", "memory", "s3"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Store:
    if request.param == "s3":
        return Store(request.getfixturevalue("s3_uri"))
    return Store(str(tmp_path / "root") if request.param == "local" else f"memory://{tmp_path.name}")


def test_create_lets_one_writer_through(store: Store) -> None:
    assert store.create("a/1.json", b"first")
    assert not store.create("a/1.json", b"second")
    assert store.get("a/1.json") == b"first"


def test_keys_are_listed_by_folder(store: Store) -> None:
    for key in ("runs/b/1", "runs/a/2", "runs/a/1", "other/1"):
        store.put(key, b"x")
    assert store.list("runs/a") == ["runs/a/1", "runs/a/2"]
    assert store.folders("runs") == ["a", "b"]


def test_absent_things_are_none_and_empty(store: Store) -> None:
    assert store.get("no/such") is None
    assert store.list("no") == []
    assert store.folders("no") == []
    store.delete("no/such")


def test_put_replaces_and_delete_removes(store: Store) -> None:
    store.put("k", b"1")
    store.put("k", b"2")
    assert store.get("k") == b"2"
    store.delete("k")
    assert store.get("k") is None


def test_reading_a_local_store_creates_nothing(tmp_path: Path) -> None:
    store = Store(str(tmp_path / "absent"))
    assert store.get("a") is None
    assert store.list("") == []
    assert not (tmp_path / "absent").exists()


def _race(uri: str, number: int, barrier: object, wins: object) -> None:
    store = Store(uri)
    for key in range(50):
        barrier.wait()  # type: ignore[attr-defined]
        if store.create(f"race/{key}", str(number).encode() * 1000):
            wins.put((key, number))  # type: ignore[attr-defined]


def test_of_racing_processes_one_wins_each_key(tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    barrier, wins = context.Barrier(4), context.Queue()
    racers = [context.Process(target=_race, args=(str(tmp_path), n, barrier, wins)) for n in range(4)]
    for racer in racers:
        racer.start()
    for racer in racers:
        racer.join(60)
    won = dict(wins.get(timeout=10) for _ in range(50))
    assert sorted(won) == list(range(50))
    assert wins.empty()
    store = Store(str(tmp_path))
    assert all(store.get(f"race/{key}") == str(number).encode() * 1000 for key, number in won.items())


def test_a_store_crosses_processes_by_its_address(tmp_path: Path) -> None:
    store = Store(str(tmp_path))
    store.put("k", b"v")
    assert pickle.loads(pickle.dumps(store)).get("k") == b"v"


def test_an_unknown_scheme_is_the_users_mistake() -> None:
    with pytest.raises(UserError) as caught:
        Store("ftp://host/path")
    assert caught.value.code is ErrorCode.STORAGE


@pytest.mark.parametrize("uri", ["s3://[x", "~nouser/x", "a\0b", "file:///a%00b", "a\udcffb"])
def test_what_is_neither_a_path_nor_a_uri_is_the_users_mistake(uri: str) -> None:
    with pytest.raises(UserError) as caught:
        Store(uri)
    assert caught.value.code is ErrorCode.STORAGE


def test_a_relative_root_needs_a_working_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    with pytest.raises(UserError, match="the working directory does not exist any more") as caught:
        Store("runs")
    assert caught.value.code is ErrorCode.STORAGE


def test_a_root_that_cannot_be_made_is_the_users_mistake(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("not a folder")
    for root in (tmp_path / "file", tmp_path / "file" / "below", Path("/proc/x"), tmp_path / ("a" * 5000)):
        with pytest.raises(UserError, match="the file system refuses this path") as caught:
            Store(str(root)).put("k", b"v")
        assert (caught.value.code, caught.value.retryable) == (ErrorCode.STORAGE, False)
    with pytest.raises(UserError, match="the file system refuses this path"):
        Store(str(tmp_path / ("a" * 5000))).list("runs")


def test_a_file_in_the_place_of_the_root_is_reported(tmp_path: Path) -> None:
    (tmp_path / "root").write_text("not a folder")
    with pytest.raises(VerlWorkflowError) as caught:
        Store(str(tmp_path / "root")).put("k", b"v")
    assert str(tmp_path / "root") in str(caught.value)


def test_a_file_in_the_place_of_the_root_is_no_empty_storage(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    store = Store(str(tmp_path / "file"))
    for read in (store.get, store.list, store.folders):
        with pytest.raises(UserError, match="has to be a folder"):
            read("runs")


def test_a_path_with_a_space_stays_itself(tmp_path: Path) -> None:
    store = Store(str(tmp_path / "my runs"))
    store.put("k", b"v")
    assert store.local_path == tmp_path / "my runs"
    assert Store(absolute_uri(store.uri)).get("k") == b"v"


def test_a_folder_whose_name_is_no_text_hides_no_other(tmp_path: Path) -> None:
    store = Store(str(tmp_path))
    store.put("runs/a/1", b"v")
    (tmp_path / "runs" / os.fsdecode(b"\xff")).mkdir()
    (tmp_path / "runs" / "file").touch()
    assert store.folders("runs") == ["a"]
    assert store.folders("nothing") == []


def test_a_root_that_is_moved_away_is_not_made_anew(tmp_path: Path) -> None:
    store = Store(str(tmp_path / "root"))
    store.put("a", b"1")
    first = store.identity()
    (tmp_path / "root").rename(tmp_path / "away")
    for write in (store.put, store.create):
        with pytest.raises(VerlWorkflowError, match="folder is gone") as caught:
            write("b", b"2")
        assert caught.value.retryable
    assert store.identity() is None
    assert not (tmp_path / "root").exists()
    (tmp_path / "root").mkdir()
    assert store.identity() not in (None, first)
    (tmp_path / "root").rmdir()
    (tmp_path / "away").rename(tmp_path / "root")
    assert store.identity() == first
    store.put("b", b"2")
    assert (store.get("a"), store.get("b")) == (b"1", b"2")


def test_what_a_dead_writer_has_left_is_seen_and_is_no_key(tmp_path: Path) -> None:
    store = Store(str(tmp_path / "root"))
    store.put("runs/r/values/a.pkl", b"1")
    left = tmp_path / "root" / "runs" / "r" / "values" / "b.pkl#17"
    left.write_bytes(b"half")
    (path, age, size), *others = store.unfinished("runs/r")
    assert (path, size, others) == (left, 4, [])
    assert 0 <= age < 60
    assert store.list("runs") == ["runs/r/values/a.pkl"]
    assert list(Store("memory://nothing").unfinished("runs")) == list(store.unfinished("absent")) == []
