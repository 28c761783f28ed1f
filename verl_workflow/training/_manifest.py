"""Marks a checkpoint whole: verl calls this on its driver after the last byte of a save."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from omegaconf import OmegaConf
from verl.trainer.ppo.checkpoint_callback import CheckpointCallback
from verl.utils.import_utils import load_class_from_fqn

from verl_workflow.training._publish import publish


class ManifestCallback(CheckpointCallback):  # type: ignore[misc]
    """Named in ``trainer.checkpoint_callback_class``; ends the training of an attempt that has been overtaken.

    A callback of the user's own, ``trainer.v1.supervised.callback``, is called after it, with the checkpoint's final
    place.
    """

    def __init__(self, config: Any = None) -> None:
        super().__init__(config=config)
        self._facts: dict[str, Any] = OmegaConf.to_container(config.trainer.v1.supervised)
        theirs = self._facts.get("callback")
        self._theirs = load_class_from_fqn(theirs, "CheckpointCallback")(config=config) if theirs else None

    def on_save(
        self, trainer: Any, global_step: int, checkpoint_dir: str, async_save: bool = False, **kwargs: Any
    ) -> None:
        place = publish(
            Path(checkpoint_dir),
            Path(self._facts["checkpoints"]),
            owner=self._facts["owner"],
            identity=self._facts["identity"],
            roles=self._facts["roles"],
        )
        if self._theirs is not None:
            self._theirs.on_save(
                trainer=trainer, global_step=global_step, checkpoint_dir=str(place), async_save=async_save, **kwargs
            )
