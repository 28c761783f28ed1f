"""What a power cut would leave at any moment, told by what has been flushed when a name appears."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from verl_workflow.storage import Store


class Disk:
    """Follows what the disk has been told to keep: contents of files, and names in folders."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.contents: dict[int, int] = {}
        self.names: set[tuple[str, str]] = set()
        flush = os.fsync

        def fsync(descriptor: int) -> None:
            path = Path(f"/proc/self/fd/{descriptor}").readlink()
            if path.is_dir():
                self.names |= {(str(path), entry.name) for entry in path.iterdir()}
            else:
                found = os.fstat(descriptor)
                self.contents[found.st_ino] = found.st_size
            flush(descriptor)

        monkeypatch.setattr(os, "fsync", fsync)
        for owner, name in ((Path, "hardlink_to"), (Path, "replace")):
            self._watch(monkeypatch, owner, name)

    def _watch(self, monkeypatch: pytest.MonkeyPatch, owner: type[Path], name: str) -> None:
        does = getattr(owner, name)

        def named(path: Path, other: Path) -> object:
            source = other if name == "hardlink_to" else path
            assert self.keeps_content(source), f"{source} gets a name before its content is on the disk"
            return does(path, other)

        monkeypatch.setattr(owner, name, named)

    def keeps_content(self, path: Path) -> bool:
        found = path.stat()
        return self.contents.get(found.st_ino) == found.st_size

    def keeps(self, path: Path, root: Path) -> bool:
        """Whether it would be there after a power cut: its content, its name, and the names of its folders."""
        above = [path, *(folder for folder in path.parents if folder.is_relative_to(root))]
        return self.keeps_content(path) and all((str(each.parent), each.name) in self.names for each in above)


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Disk:
    return Disk(monkeypatch)


def test_a_write_returns_when_the_file_would_outlive_a_power_cut(tmp_path: Path, disk: Disk) -> None:
    root = tmp_path / "root"
    store = Store(str(root), durability="power")
    assert store.create("runs/a/1", b"one")
    assert disk.keeps(root / "runs/a/1", root)
    store.put("runs/a/1", b"longer")
    assert disk.keeps(root / "runs/a/1", root)
    store.put("runs/b/c/2", b"two")
    assert disk.keeps(root / "runs/b/c/2", root)
    assert store.list("runs") == ["runs/a/1", "runs/b/c/2"]
    assert (store.get("runs/a/1"), store.get("runs/b/c/2")) == (b"longer", b"two")


def test_what_is_there_is_not_written_over_and_nothing_is_left_beside_it(tmp_path: Path, disk: Disk) -> None:
    store = Store(str(tmp_path), durability="power")
    assert store.create("a/1", b"first")
    assert not store.create("a/1", b"second")
    assert store.get("a/1") == b"first"
    assert [entry.name for entry in (tmp_path / "a").iterdir()] == ["1"]


def test_a_file_that_was_being_written_is_shown_to_nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def cut(descriptor: int) -> None:
        raise KeyboardInterrupt

    store = Store(str(tmp_path), durability="power")
    store.put("a/1", b"first")
    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", cut)
        patched.setattr(Path, "unlink", lambda *_, **__: None)
        with pytest.raises(KeyboardInterrupt):
            store.put("a/1", b"second")
        with pytest.raises(KeyboardInterrupt):
            store.create("a/2", b"second")
    assert len(list((tmp_path / "a").iterdir())) == 3
    assert store.list("a") == ["a/1"]
    assert (store.get("a/1"), store.get("a/2")) == (b"first", None)
    assert store.create("a/2", b"third")


def test_without_it_nothing_waits_for_the_disk(tmp_path: Path, disk: Disk) -> None:
    Store(str(tmp_path), durability="process").put("a/1", b"first")
    assert (disk.contents, disk.names) == ({}, set())


def test_a_folder_that_is_removed_while_it_is_still_empty_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opens, removed = Path.open, []

    def late(path: Path, *arguments: str) -> object:
        if not removed:
            removed.append(path.parent)
            path.parent.rmdir()
        return opens(path, *arguments)

    monkeypatch.setattr(Path, "open", late)
    store = Store(str(tmp_path), durability="power")
    assert store.create("runs/a/1", b"one")
    assert removed == [tmp_path / "runs" / "a"]
    assert store.get("runs/a/1") == b"one"
