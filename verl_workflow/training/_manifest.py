"""Marks a checkpoint whole: verl calls this on its driver after the last byte of a save."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from verl.trainer.ppo.checkpoint_callback import CheckpointCallback

from verl_workflow.training._checkpoints import write_manifest


class ManifestCallback(CheckpointCallback):  # type: ignore[misc]
    """Named in ``trainer.checkpoint_callback_class``."""

    def on_save(
        self, trainer: Any, global_step: int, checkpoint_dir: str, async_save: bool = False, **kwargs: Any
    ) -> None:
        write_manifest(Path(checkpoint_dir))
