from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from _training_pieces import checkpoint, saved, stage
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from verl_workflow.spec import KeepBest
from verl_workflow.training import _retention
from verl_workflow.training._checkpoints import checkpoints, tidy
from verl_workflow.training._metrics import Row
from verl_workflow.training._owner import OvertakenError, claim, owner_of, saving_folder
from verl_workflow.training._publish import publish
from verl_workflow.training._retention import Retention, best_of, best_steps, handed_on, kept_steps, prune

ACTOR = ("actor",)


def rewards(*values: float) -> list[Row]:
    return [Row(step=step, data={"critic/score/mean": value}) for step, value in enumerate(values, 1)]


def steps_in(root: Path) -> list[int]:
    return [found.step for found in checkpoints(root)]


def test_the_best_are_found_by_the_reward_or_by_a_metric() -> None:
    rows = rewards(0.1, 0.9, 0.3, 0.9, 0.2)
    assert best_steps([1, 2, 3, 4, 5], rows, KeepBest()) == [4]
    assert best_steps([1, 2, 3, 5], rows, KeepBest(count=2)) == [2, 3]
    assert best_steps([1, 2, 3, 4, 5], rows, KeepBest(mode="min")) == [1]
    kl = [Row(step=step, data={"actor/ppo_kl": step}) for step in (2, 4)]
    assert best_steps([2, 4], kl, KeepBest(metric="actor/ppo_kl")) == [4]


def test_a_step_between_validations_has_the_figure_of_the_one_before() -> None:
    rows = [Row(step=2, data={"val/acc": 0.5}), Row(step=4, data={"val/acc": 0.4})]
    assert best_steps([1, 3, 4], rows, KeepBest(metric="val/acc")) == [3]
    assert best_steps([1], rows, KeepBest(metric="val/acc")) == []


def test_the_newest_and_the_best_stay(tmp_path: Path) -> None:
    saved(tmp_path, 1, 2, 3, 4, 5)
    prune(tmp_path, keep=2, keep_best=KeepBest(), rows=rewards(0.1, 0.9, 0.2, 0.2, 0.2))
    assert steps_in(tmp_path) == [2, 4, 5]
    prune(tmp_path, keep=2, keep_best=None, rows=[])
    assert steps_in(tmp_path) == [4, 5]


def test_a_checkpoint_is_not_judged_before_its_figure_is_there(tmp_path: Path) -> None:
    saved(tmp_path, 1, 2, 3, 4)
    rows = rewards(0.1, 0.8, 0.9)
    # Of step 4 nothing is known, and it must not pass for as good as step 3.
    prune(tmp_path, keep=2, keep_best=KeepBest(count=2), rows=rows)
    assert steps_in(tmp_path) == [2, 3, 4]


def test_what_a_killed_deletion_left_is_deleted(tmp_path: Path) -> None:
    saved(tmp_path, 2, 4, 6)
    (tmp_path / "global_step_2").rename(tmp_path / "deleting-global_step_2-17")
    prune(tmp_path, keep=2, keep_best=None, rows=[])
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["global_step_4", "global_step_6"]


def test_while_it_trains_it_prunes_once_for_each_checkpoint_whose_step_is_logged(tmp_path: Path) -> None:
    pruned: list[int] = []
    retention = Retention(root=tmp_path, prune=lambda: pruned.append(steps_in(tmp_path)[-1]))
    retention.after(1)
    saved(tmp_path, 2)
    retention.after(1)
    assert pruned == []
    for step in (2, 3):
        retention.after(step)
    saved(tmp_path, 4)
    retention.after(4)
    assert pruned == [2, 4]


def test_the_best_one_is_told_with_its_figure_and_only_if_it_is_whole(tmp_path: Path) -> None:
    saved(tmp_path, 1, 2, 3)
    rows, bound = rewards(0.1, 0.9, 0.5), {"world_size": 1, "roles": ACTOR, "identity": {}}
    best = best_of(tmp_path, rows, KeepBest(), **bound)
    assert best is not None
    place = str(tmp_path / "global_step_2")
    assert best.to_json() == {"path": place, "step": 2, "metric": "reward", "value": 0.9}
    (tmp_path / "global_step_2/data.pt").unlink()
    best = best_of(tmp_path, rows, KeepBest(), **bound)
    assert best is not None
    assert (best.checkpoint.step, best.value) == (3, 0.5)
    assert best_of(tmp_path, rows, KeepBest(metric="val/none"), **bound) is None


def test_the_last_or_the_best_model_is_handed_on(tmp_path: Path) -> None:
    saved(tmp_path, 1, 2)
    first, last = checkpoints(tmp_path)
    best = best_of(tmp_path, rewards(0.9, 0.1), KeepBest(), world_size=1, roles=ACTOR, identity={})
    said: list[str] = []
    assert handed_on(stage(keep_best={}), last, best, said.append) == last
    assert handed_on(stage(keep_best={}, hand_on="best"), last, best, said.append) == first
    assert said == []
    assert handed_on(stage(keep_best={"metric": "val/x"}, hand_on="best"), last, None, said.append) == last
    assert said == ["val/x (keep_best.metric) was never measured: the last step's model is handed on"]
    with pytest.raises(ValidationError, match="set keep_best"):
        stage(hand_on="best")


@given(
    steps=st.lists(st.integers(1, 30), unique=True, max_size=12).map(sorted),
    keep=st.integers(2, 4),
    best=st.lists(st.integers(1, 30), max_size=3),
)
def test_the_newest_always_stays_and_no_more_than_asked(steps: list[int], keep: int, best: list[int]) -> None:
    kept = kept_steps(steps, keep=keep, best=best)
    assert set(steps[-keep:]) <= kept <= set(steps)
    assert len(kept) <= keep + len(set(best))


class Killed(Exception):
    """Of a process, in the middle of what it does."""


@settings(deadline=None, max_examples=60)
@given(
    events=st.lists(
        st.sampled_from(
            ["save", "save", "save", "killed while saving", "killed while pruning", "killed", "orphan saves"]
        ),
        max_size=20,
    ),
    values=st.lists(st.floats(0, 1), min_size=25, max_size=25),
    keep=st.integers(2, 3),
    count=st.integers(0, 2),
)
def test_over_saves_attempts_and_kills_the_newest_survives_and_few_are_kept(
    tmp_path_factory: pytest.TempPathFactory, events: list[str], values: list[float], keep: int, count: int
) -> None:
    root = tmp_path_factory.mktemp("checkpoints")
    best = KeepBest(count=count) if count else None
    rows = rewards(*values)
    attempt, step, newest, ever = 1, 0, 0, []
    claim(root, owner_of(1, attempt))

    def save(by: int, at: int) -> None:
        owner = owner_of(1, by)
        publish(checkpoint(saving_folder(root, owner), at), root, owner=owner, identity={}, roles=ACTOR)

    def pruned() -> None:
        prune(root, keep=keep, keep_best=best, rows=rows[:step])

    def killed_in(folder: Path) -> None:
        folder.rename(folder.with_name(f"deleting-{folder.name}-17"))
        raise Killed

    for event in events:
        if event == "orphan saves":
            with pytest.raises((OvertakenError, OSError)):
                save(attempt - 1, step + 1)
            continue
        if event == "save" or event == "killed while pruning":
            step += 1
            save(attempt, step)
            newest = step
            ever.append(step)
        if event == "save":
            pruned()
        else:
            if event == "killed while saving":
                (checkpoint(saving_folder(root, owner_of(1, attempt)), step + 1) / "data.pt").unlink()
            elif event == "killed while pruning":
                with pytest.MonkeyPatch.context() as patch, pytest.raises(Killed):
                    patch.setattr(_retention, "discard", killed_in)
                    pruned()
                    raise Killed
            attempt += 1
            claim(root, owner_of(1, attempt))
            whole, broken = tidy(root, world_size=1, roles=ACTOR)
            pruned()
            assert broken == []
            step = whole[-1].step if whole else 0
            assert step == newest
        there = steps_in(root)
        assert (there[-1] if there else 0) == newest
        assert len(there) <= keep + count
        if best is not None:
            assert set(best_steps(ever, rows[:step], best)) <= set(there)
    shutil.rmtree(root)
