from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
from _training_pieces import checkpoint, saved, torch_archive

from verl_workflow.errors import ErrorCode, VerlWorkflowError
from verl_workflow.training import _checkpoints
from verl_workflow.training._checkpoints import (
    checkpoints,
    fault,
    newest_valid,
    quarantine,
    require_space,
    size_of,
    tidy,
    write_manifest,
)
from verl_workflow.training._identity import bind, bound_settings

IDENTITY = {"model": "a" * 64, "train": "b" * 64, "world_size": 1, "algorithm": "grpo"}
ACTOR = ("actor",)
BOTH = ("actor", "critic")


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-10])


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[content.index(b"weights")] ^= 0xFF
    path.write_bytes(bytes(content))


DAMAGE: dict[str, Callable[[Path], object]] = {
    "a shard is missing": lambda folder: (folder / "actor/optim_world_size_1_rank_0.pt").unlink(),
    "a shard is empty": lambda folder: (folder / "actor/model_world_size_1_rank_0.pt").write_bytes(b""),
    "a shard is cut off": lambda folder: cut(folder / "actor/model_world_size_1_rank_0.pt"),
    "a byte is wrong": lambda folder: flip(folder / "actor/extra_state_world_size_1_rank_0.pt"),
    "the FSDP config is missing": lambda folder: (folder / "actor/fsdp_config.json").unlink(),
    "the FSDP config is cut off": lambda folder: (folder / "actor/fsdp_config.json").write_text("{"),
    "the data state is missing": lambda folder: (folder / "data.pt").unlink(),
    "the data state is cut off": lambda folder: cut(folder / "data.pt"),
    "the save was not seen through": lambda folder: (folder / "manifest.json").unlink(),
    "it is of another step": lambda folder: shutil.copy(folder.with_name("global_step_2") / "manifest.json", folder),
    "the manifest is cut off": lambda folder: cut(folder / "manifest.json"),
    "the exported weights shrank": lambda folder: cut(folder / "actor/huggingface/model.safetensors"),
    "the tokenizer is gone": lambda folder: (folder / "actor/huggingface/tokenizer.json").unlink(),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_any_damage_makes_the_one_before_the_newest_valid(tmp_path: Path, damage: str) -> None:
    saved(tmp_path, 2, 4)
    newest = tmp_path / "global_step_4"
    assert newest_valid(tmp_path, world_size=1, roles=ACTOR) == checkpoints(tmp_path)[1]
    DAMAGE[damage](newest)
    found = newest_valid(tmp_path, world_size=1, roles=ACTOR)
    assert found is not None
    assert found.step == 2


def test_each_rank_and_each_role_counts(tmp_path: Path) -> None:
    saved(tmp_path, 3, roles=BOTH, world_size=2)
    folder = tmp_path / "global_step_3"
    (found,) = checkpoints(tmp_path)
    assert fault(found, world_size=2, roles=BOTH) is None
    assert fault(found, world_size=4, roles=BOTH) == "actor/model_world_size_4_rank_0.pt is missing"
    (folder / "critic/model_world_size_2_rank_1.pt").unlink()
    assert fault(found, world_size=2, roles=BOTH) == "critic/model_world_size_2_rank_1.pt is missing"


@pytest.mark.parametrize("tracker", [None, "", "2", "77", "ten"])
def test_steps_are_ordered_as_numbers_and_verls_tracker_is_not_asked(tmp_path: Path, tracker: str | None) -> None:
    saved(tmp_path, 9, 10, 2)
    if tracker is not None:
        (tmp_path / "latest_checkpointed_iteration.txt").write_text(tracker)
    found = newest_valid(tmp_path, world_size=1, roles=ACTOR)
    assert found is not None
    assert found.step == 10


def test_nothing_there(tmp_path: Path) -> None:
    assert newest_valid(tmp_path / "none", world_size=1, roles=ACTOR) is None


def test_large_archives_are_judged_without_reading_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_checkpoints, "_CRC_LIMIT", 4)
    saved(tmp_path, 1)
    folder = tmp_path / "global_step_1"
    (found,) = checkpoints(tmp_path)
    assert fault(found, world_size=1, roles=ACTOR) is None
    cut(folder / "actor/model_world_size_1_rank_0.pt")
    assert fault(found, world_size=1, roles=ACTOR) is not None


def test_tidy_leaves_what_can_be_resumed_from_and_says_why_it_sets_the_others_aside(tmp_path: Path) -> None:
    saved(tmp_path, 2, 3, 4, 5)
    (tmp_path / "global_step_5/data.pt").unlink()
    checkpoint(tmp_path / "saving-1.1", 6)
    (tmp_path / "deleting-global_step_1-17").mkdir()
    whole, broken = tidy(tmp_path, world_size=1, roles=ACTOR)
    assert [found.step for found in whole] == [2, 3, 4]
    assert broken == ["the checkpoint of step 5 was set aside as broken-global_step_5: data.pt is missing"]
    assert sorted(entry.name for entry in tmp_path.iterdir()) == [
        "broken-global_step_5",
        "global_step_2",
        "global_step_3",
        "global_step_4",
        "saving-1.1",
    ]
    assert list((tmp_path / "saving-1.1").iterdir()) == []


def test_of_broken_ones_only_the_last_set_aside_is_kept_to_be_looked_at(tmp_path: Path) -> None:
    saved(tmp_path, 3, 4, 5)
    for step in (4, 5, 3):
        (tmp_path / f"global_step_{step}/data.pt").unlink()
        tidy(tmp_path, world_size=1, roles=ACTOR)
    assert [entry.name for entry in tmp_path.iterdir()] == ["broken-global_step_3"]


def test_bytes_that_somebody_wrote_over_a_saved_checkpoint_are_noticed(tmp_path: Path) -> None:
    folder = checkpoint(tmp_path, 4)
    write_manifest(folder, writer="1.1")
    assert fault(checkpoints(tmp_path)[0], world_size=1, roles=ACTOR) is None
    name = "model_world_size_1_rank_0.pt"
    size = (folder / "actor" / name).stat().st_size
    torch_archive(folder / "actor" / name, b"weighty")
    assert (folder / "actor" / name).stat().st_size == size
    assert fault(checkpoints(tmp_path)[0], world_size=1, roles=ACTOR) == f"actor/{name} has changed since it was saved"


def test_quarantine_never_overwrites(tmp_path: Path) -> None:
    names = []
    for _ in range(2):
        checkpoint(tmp_path, 7)
        names.append(quarantine(checkpoints(tmp_path)[0]).name)
    assert names == ["broken-global_step_7", "broken-global_step_7-2"]
    assert checkpoints(tmp_path) == []


def test_a_checkpoint_of_something_else_is_not_resumed_from(tmp_path: Path) -> None:
    write_manifest(checkpoint(tmp_path, 4), identity={**IDENTITY, "model": "c" * 64}, roles=ACTOR)
    (found,) = checkpoints(tmp_path)
    assert fault(found, world_size=1, roles=ACTOR, identity=IDENTITY) == (
        f"it was made with another model: {'c' * 64}, not {'a' * 64}"
    )
    write_manifest(found.path, identity=IDENTITY, roles=ACTOR)
    assert fault(found, world_size=1, roles=ACTOR, identity=IDENTITY) is None


def test_the_manifest_says_what_was_saved_by_whom(tmp_path: Path) -> None:
    folder = checkpoint(tmp_path, 4)
    (folder / "manifest.json.partial").write_text("half of an earlier one")
    write_manifest(folder, writer="2.3", identity=IDENTITY, roles=ACTOR)
    manifest = json.loads((folder / "manifest.json").read_text())
    assert (manifest["step"], manifest["writer"], manifest["roles"]) == (4, "2.3", ["actor"])
    assert manifest["identity"] == IDENTITY
    assert {"data.pt", "actor/fsdp_config.json", "actor/optim_world_size_1_rank_0.pt"} <= set(manifest["files"])
    assert fault(checkpoints(tmp_path)[0], world_size=1, roles=ACTOR, identity=IDENTITY) is None


def test_a_full_disk_is_told_before_the_start(tmp_path: Path) -> None:
    require_space(tmp_path, model_bytes=1000)
    with pytest.raises(VerlWorkflowError, match="GB free") as caught:
        require_space(tmp_path, model_bytes=10**18)
    assert caught.value.code is ErrorCode.STORAGE
    saved(tmp_path, 1)
    # Once a checkpoint is there, its size is what counts.
    require_space(tmp_path, model_bytes=10**18)


def test_what_gives_way_counts_as_free_before_the_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saved(tmp_path, 2, 3, 4)
    size = size_of(tmp_path / "global_step_4") + 64
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=size))
    with pytest.raises(VerlWorkflowError, match="GB free"):
        require_space(tmp_path, model_bytes=1)
    quarantine(checkpoints(tmp_path)[0])
    require_space(tmp_path, model_bytes=1)


def test_folder_belongs_to_what_first_trained_in_it(tmp_path: Path) -> None:
    bind(tmp_path, IDENTITY)
    bind(tmp_path, IDENTITY)
    with pytest.raises(VerlWorkflowError, match="another model") as caught:
        bind(tmp_path, {**IDENTITY, "model": "c" * 64})
    assert caught.value.code is ErrorCode.CHECKPOINT_INVALID
    assert not caught.value.retryable


def test_another_setting_that_decides_what_is_in_the_files_is_named(tmp_path: Path) -> None:
    bind(tmp_path, {**IDENTITY, **bound_settings({"actor_rollout_ref.model.lora_rank": 8})})
    with pytest.raises(VerlWorkflowError, match=r"another actor_rollout_ref\.model\.lora_rank: 8, not None"):
        bind(tmp_path, {**IDENTITY, **bound_settings({})})


def test_another_number_of_gpus_names_both_and_the_line_that_goes_on(tmp_path: Path) -> None:
    root = tmp_path / "checkpoints"
    root.mkdir()
    bind(root, {"world_size": 4})

    def told() -> str:
        with pytest.raises(VerlWorkflowError, match="world size: 4, not 8") as caught:
            bind(root, {"world_size": 8})
        return caught.value.remedy

    assert "Or start a new run." in told()
    saved(root, 9, 10)
    (root / "global_step_10/actor/huggingface/model.safetensors").unlink()
    assert f"`model: {{path: {root}/global_step_9/actor/huggingface}}`" in told()
    (root / "global_step_9/actor/huggingface/model.safetensors").unlink()
    merge = f"`python -m verl.model_merger merge --backend fsdp --local_dir {root}/global_step_10/actor"
    assert merge in told()
    assert f"`model: {{path: {tmp_path}/model}}`" in told()
    exported = tmp_path / "attempts/002/model"
    exported.mkdir(parents=True)
    (exported / "config.json").touch()
    assert f"`model: {{path: {exported}}}`" in told()
