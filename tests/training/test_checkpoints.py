from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from _training_pieces import checkpoint

from verl_workflow.errors import ErrorCode, VerlWorkflowError
from verl_workflow.training import _checkpoints
from verl_workflow.training._checkpoints import (
    checkpoints,
    fault,
    newest_valid,
    quarantine,
    require_space,
    tidy,
    write_manifest,
)
from verl_workflow.training._identity import bind

ACTOR = ("actor",)
BOTH = ("actor", "critic")


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-10])


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[content.index(b"weights")] ^= 0xFF
    path.write_bytes(bytes(content))


DAMAGE: dict[str, Callable[[Path], None]] = {
    "a shard is missing": lambda folder: (folder / "actor/optim_world_size_1_rank_0.pt").unlink(),
    "a shard is empty": lambda folder: (folder / "actor/model_world_size_1_rank_0.pt").write_bytes(b""),
    "a shard is cut off": lambda folder: cut(folder / "actor/model_world_size_1_rank_0.pt"),
    "a byte is wrong": lambda folder: flip(folder / "actor/extra_state_world_size_1_rank_0.pt"),
    "the FSDP config is missing": lambda folder: (folder / "actor/fsdp_config.json").unlink(),
    "the FSDP config is cut off": lambda folder: (folder / "actor/fsdp_config.json").write_text("{"),
    "the data state is missing": lambda folder: (folder / "data.pt").unlink(),
    "the data state is cut off": lambda folder: cut(folder / "data.pt"),
    "the manifest is cut off": lambda folder: cut(folder / "manifest.json"),
    "the exported weights shrank": lambda folder: cut(folder / "actor/huggingface/model.safetensors"),
    "the tokenizer is gone": lambda folder: (folder / "actor/huggingface/tokenizer.json").unlink(),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_any_damage_makes_the_one_before_the_newest_valid(tmp_path: Path, damage: str) -> None:
    checkpoint(tmp_path, 2)
    newest = checkpoint(tmp_path, 4)
    write_manifest(newest)
    assert newest_valid(tmp_path, world_size=1, roles=ACTOR) == checkpoints(tmp_path)[1]
    DAMAGE[damage](newest)
    found = newest_valid(tmp_path, world_size=1, roles=ACTOR)
    assert found is not None
    assert found.step == 2


def test_each_rank_and_each_role_counts(tmp_path: Path) -> None:
    folder = checkpoint(tmp_path, 3, roles=BOTH, world_size=2)
    (found,) = checkpoints(tmp_path)
    assert fault(found, world_size=2, roles=BOTH) is None
    assert fault(found, world_size=4, roles=BOTH) == "actor/model_world_size_4_rank_0.pt is missing"
    (folder / "critic/model_world_size_2_rank_1.pt").unlink()
    assert fault(found, world_size=2, roles=ACTOR) is None
    assert fault(found, world_size=2, roles=BOTH) == "critic/model_world_size_2_rank_1.pt is missing"


def test_steps_are_ordered_as_numbers_and_verls_tracker_is_not_asked(tmp_path: Path) -> None:
    for step in (9, 10, 2):
        checkpoint(tmp_path, step)
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("")
    found = newest_valid(tmp_path, world_size=1, roles=ACTOR)
    assert found is not None
    assert found.step == 10


def test_nothing_there(tmp_path: Path) -> None:
    assert newest_valid(tmp_path / "none", world_size=1, roles=ACTOR) is None


def test_large_archives_are_judged_without_reading_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_checkpoints, "_CRC_LIMIT", 4)
    folder = checkpoint(tmp_path, 1)
    (found,) = checkpoints(tmp_path)
    assert fault(found, world_size=1, roles=ACTOR) is None
    cut(folder / "actor/model_world_size_1_rank_0.pt")
    assert fault(found, world_size=1, roles=ACTOR) is not None


def test_tidy_keeps_the_newest_valid_and_sets_broken_ones_aside(tmp_path: Path) -> None:
    for step in (1, 2, 3, 4, 5):
        checkpoint(tmp_path, step)
    (tmp_path / "global_step_5/data.pt").unlink()
    pruned_by_verl = tmp_path / "global_step_1"
    for entry in sorted((pruned_by_verl / "actor").rglob("*"), reverse=True):
        entry.unlink() if entry.is_file() else entry.rmdir()
    (pruned_by_verl / "actor").rmdir()
    newest = tidy(tmp_path, world_size=1, roles=ACTOR, keep=2)
    assert newest is not None
    assert newest.step == 4
    assert sorted(entry.name for entry in tmp_path.iterdir()) == [
        "broken-global_step_5",
        "global_step_3",
        "global_step_4",
    ]


def test_quarantine_never_overwrites(tmp_path: Path) -> None:
    names = []
    for _ in range(2):
        checkpoint(tmp_path, 7)
        names.append(quarantine(checkpoints(tmp_path)[0]).name)
    assert names == ["broken-global_step_7", "broken-global_step_7-2"]
    assert checkpoints(tmp_path) == []


def test_a_full_disk_is_told_before_the_start(tmp_path: Path) -> None:
    require_space(tmp_path, model_bytes=1000)
    with pytest.raises(VerlWorkflowError, match="GB free") as caught:
        require_space(tmp_path, model_bytes=10**18)
    assert caught.value.code is ErrorCode.STORAGE
    checkpoint(tmp_path, 1)
    # Once a checkpoint is there, its size is what counts.
    require_space(tmp_path, model_bytes=10**18)


def test_folder_belongs_to_what_first_trained_in_it(tmp_path: Path) -> None:
    identity = {"model": "a" * 64, "train": "b" * 64, "world_size": 4, "algorithm": "grpo"}
    bind(tmp_path, identity)
    bind(tmp_path, identity)
    with pytest.raises(VerlWorkflowError, match="another model") as caught:
        bind(tmp_path, {**identity, "model": "c" * 64})
    assert caught.value.code is ErrorCode.CHECKPOINT_INVALID
    assert not caught.value.retryable


def test_another_number_of_gpus_names_both_and_the_way_out(tmp_path: Path) -> None:
    bind(tmp_path, {"world_size": 4})
    with pytest.raises(VerlWorkflowError, match=r"world size: 4 \(got 8\).*exported model"):
        bind(tmp_path, {"world_size": 8})
