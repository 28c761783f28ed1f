from __future__ import annotations

import shutil
from collections import namedtuple
from pathlib import Path

import pytest
from _training_pieces import saved

from verl_workflow.training._checkpoints import size_of
from verl_workflow.training._disk import DiskWatch

Usage = namedtuple("Usage", "total used free")


@pytest.fixture
def free(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The last entry is what the disk has free."""
    left = [1 << 40]
    monkeypatch.setattr(shutil, "disk_usage", lambda _: Usage(1 << 50, 0, left[-1]))
    return left


def test_it_is_looked_at_before_a_save_alone(tmp_path: Path, free: list[int]) -> None:
    saved(tmp_path, 2)
    folder = tmp_path / "global_step_2"
    watch = DiskWatch(root=tmp_path, every=2, total=7)
    free.append(size_of(folder) - 1)
    assert watch.short_of(2) is None
    assert "the next checkpoint needs" in str(watch.short_of(3))
    assert DiskWatch(root=tmp_path, every=2, total=7).short_of(6) is not None
    free.append(size_of(folder))
    assert DiskWatch(root=tmp_path, every=2, total=7).short_of(3) is None


def test_before_the_first_checkpoint_nothing_is_known(tmp_path: Path, free: list[int]) -> None:
    free.append(0)
    assert DiskWatch(root=tmp_path, every=2, total=7).short_of(1) is None


def test_a_checkpoint_that_is_there_needs_no_room(tmp_path: Path, free: list[int]) -> None:
    saved(tmp_path, 4)
    free.append(0)
    assert DiskWatch(root=tmp_path, every=2, total=7).short_of(3) is None


def test_what_is_set_aside_or_half_deleted_gives_way_before_the_training_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved(tmp_path, 2)
    useless = [tmp_path / "broken-global_step_1", tmp_path / "deleting-global_step_0-17"]
    for folder in useless:
        folder.mkdir()
    size = size_of(tmp_path / "global_step_2")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: Usage(0, 0, size - any(folder.exists() for folder in useless)))
    assert DiskWatch(root=tmp_path, every=2, total=7).short_of(3) is None
    assert [folder.name for folder in tmp_path.iterdir()] == ["global_step_2"]
