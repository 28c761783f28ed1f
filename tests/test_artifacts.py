from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from verl_workflow.artifacts import Artifact
from verl_workflow.errors import ErrorCode, VerlWorkflowError


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    root = tmp_path / "folder"
    (root / "sub").mkdir(parents=True)
    (root / "a.bin").write_bytes(b"12345")
    (root / "sub" / "b.bin").write_bytes(b"678")
    return root


def test_the_digest_depends_on_content_and_not_on_place(folder: Path, tmp_path: Path) -> None:
    there = Artifact.of(folder)
    shutil.copytree(folder, tmp_path / "moved")
    assert Artifact.of(tmp_path / "moved").sha256 == there.sha256
    assert there.bytes == 8
    (folder / "sub" / "b.bin").rename(folder / "sub" / "c.bin")
    assert Artifact.of(folder).sha256 != there.sha256


def test_a_changed_file_is_noticed(folder: Path) -> None:
    artifact = Artifact.from_json(Artifact.of(folder).to_json())
    artifact.verify()
    (folder / "a.bin").write_bytes(b"12346")
    with pytest.raises(VerlWorkflowError) as caught:
        artifact.verify()
    assert caught.value.code is ErrorCode.DATA_INVALID
    assert str(folder) in str(caught.value)


def test_what_is_gone_is_named(tmp_path: Path) -> None:
    with pytest.raises(VerlWorkflowError) as caught:
        Artifact.of(tmp_path / "gone")
    assert caught.value.code is ErrorCode.FILE_MISSING


@pytest.mark.parametrize("wrong", [{"path": 5}, {"sha256": None}, {"bytes": "x"}])
def test_what_describes_no_artifact_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(VerlWorkflowError) as caught:
        Artifact.from_json({"path": "/a", "sha256": "0", "bytes": 1, **wrong})
    assert caught.value.code is ErrorCode.DATA_INVALID
