from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

from verl_workflow.training._handover import HandedOver, ask
from verl_workflow.training._owner import OvertakenError, claim
from verl_workflow.verl_plugin._trainers import _supervised


class Plain:
    """As much of verl's trainer as its loop needs: a save each second step."""

    def __init__(self, config: Any) -> None:
        self.config = config
        self.mode = config.trainer.v1.trainer_mode
        self.global_steps = 1
        self.saved: list[int] = []

    def _save_checkpoint(self) -> None:
        self.saved.append(self.global_steps)
        folder = Path(self.config.trainer.default_local_dir) / f"global_step_{self.global_steps}"
        folder.mkdir(parents=True)

    def on_step_begin(self) -> None:
        pass

    def on_step_end(self) -> None:
        pass

    def fit(self, steps: int, ask_at: int, place: Path) -> None:
        while self.global_steps <= steps:
            self.on_step_begin()
            if self.global_steps == ask_at:
                ask(place)
            if self.global_steps % 2 == 0:
                self._save_checkpoint()
            self.on_step_end()
            self.global_steps += 1


def trainer(tmp_path: Path) -> Any:
    supervised = {"attempt_dir": str(tmp_path), "checkpoints": str(tmp_path / "c"), "owner": "1.1"}
    settings = {"trainer_mode": "supervised_sync", "supervised": supervised}
    config = OmegaConf.create({"trainer": {"v1": settings, "default_local_dir": str(tmp_path / "c")}})
    return _supervised("sync", Plain)(config)


def test_verl_sees_its_own_mode(tmp_path: Path) -> None:
    assert trainer(tmp_path).mode == "sync"


@pytest.mark.parametrize(("ask_at", "saved"), [(3, [2, 3]), (4, [2, 4])])
def test_it_saves_and_ends_when_it_is_asked_to(tmp_path: Path, ask_at: int, saved: list[int]) -> None:
    training = trainer(tmp_path)
    with pytest.raises(HandedOver, match=f"after step {ask_at}"):
        training.fit(10, ask_at, tmp_path)
    assert training.saved == saved
    # The step itself is logged before it ends.
    assert training.global_steps == ask_at + 1


def test_it_ends_as_soon_as_a_later_attempt_has_its_place(tmp_path: Path) -> None:
    (tmp_path / "c").mkdir()
    training = trainer(tmp_path)
    training.fit(1, 99, tmp_path)
    claim(tmp_path / "c", "1.2")
    with pytest.raises(OvertakenError, match=r"1\.2 trains here"):
        training.fit(9, 99, tmp_path)
    assert training.saved == []


def test_a_training_that_is_through_ends_as_it_would(tmp_path: Path) -> None:
    training = trainer(tmp_path)
    training.fit(5, 5, tmp_path)
    assert training.saved == [2, 4, 5]


def test_nobody_asks_and_nothing_changes(tmp_path: Path) -> None:
    training = trainer(tmp_path)
    training.fit(5, 99, tmp_path)
    assert training.saved == [2, 4]


def test_they_are_registered_with_verl() -> None:
    from verl.trainer.ppo.v1 import PPOTrainerSync, get_trainer_cls

    for mode in ("sync", "colocate_async", "separate_async"):
        assert issubclass(get_trainer_cls(f"supervised_{mode}"), get_trainer_cls(mode))
    assert get_trainer_cls("sync") is PPOTrainerSync
