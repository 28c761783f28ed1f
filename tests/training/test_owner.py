from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any, ClassVar

import pytest
from _training_pieces import checkpoint, saved
from hypothesis import given, settings
from hypothesis import strategies as st

from verl_workflow.training import _publish
from verl_workflow.training._checkpoints import checkpoints, fault, newest_valid
from verl_workflow.training._owner import OvertakenError, claim, owner_of, require_owner, saving_folder
from verl_workflow.training._publish import publish

ACTOR = ("actor",)


def save(root: Path, owner: str, step: int) -> Path:
    """What verl and its callback do for an attempt."""
    folder = checkpoint(saving_folder(root, owner), step)
    return publish(folder, root, owner=owner, identity={"written by": owner}, roles=ACTOR)


def writers(root: Path) -> dict[int, str]:
    """Who has written each checkpoint; all of them are whole."""
    found = {}
    for each in checkpoints(root):
        assert fault(each, world_size=1, roles=ACTOR) is None
        found[each.step] = (each.path / "manifest.json").read_text().split('"writer": "')[1].split('"')[0]
    return found


def test_only_the_latest_attempt_may_write(tmp_path: Path) -> None:
    claim(tmp_path, owner_of(1, 1))
    require_owner(tmp_path, "1.1")
    claim(tmp_path, owner_of(2, 2))
    claim(tmp_path, owner_of(2, 2))
    require_owner(tmp_path, "2.2")
    with pytest.raises(OvertakenError, match=r"attempt 2\.2 trains here"):
        require_owner(tmp_path, "1.1")


def test_a_late_claim_of_an_earlier_attempt_takes_nothing_away(tmp_path: Path) -> None:
    claim(tmp_path, "2.10")
    for late in ("1.11", "2.9"):
        with pytest.raises(OvertakenError):
            claim(tmp_path, late)
    assert save(tmp_path, "2.10", 2) == tmp_path / "global_step_2"


def test_a_folder_that_nobody_claimed_is_anybodys(tmp_path: Path) -> None:
    require_owner(tmp_path, "1.1")


def test_a_save_appears_only_when_it_is_through(tmp_path: Path) -> None:
    claim(tmp_path, "1.1")
    folder = checkpoint(saving_folder(tmp_path, "1.1"), 2)
    assert checkpoints(tmp_path) == []
    publish(folder, tmp_path, owner="1.1", identity={}, roles=ACTOR)
    assert newest_valid(tmp_path, world_size=1, roles=ACTOR) == checkpoints(tmp_path)[0]
    assert not folder.exists()


def test_what_an_overtaken_attempt_goes_on_to_save_leads_nowhere(tmp_path: Path) -> None:
    claim(tmp_path, "1.1")
    save(tmp_path, "1.1", 2)
    half = checkpoint(saving_folder(tmp_path, "1.1"), 4)
    claim(tmp_path, "1.2")
    assert not half.exists()
    with pytest.raises(OSError, match=r"saving-1\.1"):
        checkpoint(saving_folder(tmp_path, "1.1"), 6)
    save(tmp_path, "1.2", 4)
    assert writers(tmp_path) == {2: "1.1", 4: "1.2"}


def test_an_attempt_that_is_overtaken_while_it_moves_its_save_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    claim(tmp_path, "1.1")
    folder = checkpoint(saving_folder(tmp_path, "1.1"), 4)

    def checked(root: Path, owner: str) -> None:
        require_owner(root, owner)
        claim(root, "1.2")

    monkeypatch.setattr(_publish, "require_owner", checked)
    with pytest.raises(OSError, match="global_step_4"):
        publish(folder, tmp_path, owner="1.1", identity={}, roles=ACTOR)
    assert checkpoints(tmp_path) == []


@settings(deadline=None, max_examples=50)
@given(events=st.lists(st.tuples(st.integers(1, 3), st.sampled_from(["claim", "write", "publish"])), max_size=20))
def test_however_attempts_interleave_nobody_publishes_after_a_later_claim(
    tmp_path_factory: pytest.TempPathFactory, events: list[tuple[int, str]]
) -> None:
    root, claimed = tmp_path_factory.mktemp("checkpoints"), {0}
    for number, (attempt, event) in enumerate(events, 1):
        owner, before = owner_of(1, attempt), writers(root)
        folder, overtaken = saving_folder(root, owner), attempt < max(claimed)
        if event != "claim" and attempt not in claimed:
            continue
        try:
            if event == "claim":
                claim(root, owner)
                claimed.add(attempt)
            elif event == "write":
                checkpoint(folder, number)
            else:
                for begun in sorted(folder.glob("global_step_*")):
                    publish(begun, root, owner=owner, identity={}, roles=ACTOR)
        except (OvertakenError, OSError):
            assert overtaken
        added = writers(root).items() - before.items()
        assert not (overtaken and added)
        assert {writer for _, writer in added} <= {owner}
    shutil.rmtree(root)


def callback(root: Path, owner: str, **more: Any) -> Any:
    from omegaconf import OmegaConf

    from verl_workflow.training._manifest import ManifestCallback

    facts = {
        "checkpoints": str(root),
        "owner": owner,
        "identity": {"data.shuffle": True, "world_size": 1},
        "roles": ["actor"],
        "callback": None,
        **more,
    }
    return ManifestCallback(OmegaConf.create({"trainer": {"v1": {"supervised": facts}}}))


def test_verls_callback_publishes_and_ends_an_attempt_that_was_overtaken(tmp_path: Path) -> None:
    claim(tmp_path, "1.1")
    folder = checkpoint(saving_folder(tmp_path, "1.1"), 4)
    callback(tmp_path, "1.1").on_save(trainer=None, global_step=4, checkpoint_dir=str(folder), async_save=False)
    assert writers(tmp_path) == {4: "1.1"}
    assert '"data.shuffle": true' in (tmp_path / "global_step_4/manifest.json").read_text()
    late = checkpoint(saving_folder(tmp_path, "1.1"), 6)
    claim(tmp_path, "2.2")
    with pytest.raises(OvertakenError):
        callback(tmp_path, "1.1").on_save(trainer=None, global_step=6, checkpoint_dir=str(late), async_save=False)
    assert writers(tmp_path) == {4: "1.1"}


def test_a_callback_of_the_users_own_is_given_the_final_place(tmp_path: Path) -> None:
    saved(tmp_path, 2)
    folder = checkpoint(saving_folder(tmp_path, "1.1"), 4)
    ours = callback(tmp_path, "1.1", callback=f"{__name__}.Uploads")
    ours.on_save(trainer="verl", global_step=4, checkpoint_dir=str(folder), async_save=False)
    assert Uploads.told == [("verl", 4, str(tmp_path / "global_step_4"))]


class Uploads:
    told: ClassVar[list[Any]] = []

    def __init__(self, config: Any) -> None:
        assert config.trainer.v1.supervised.owner == "1.1"

    def on_save(self, trainer: Any, global_step: int, checkpoint_dir: str, **_: Any) -> None:
        self.told.append((trainer, global_step, checkpoint_dir))
