"""A replay buffer that does not sleep through the step of a small model.

verl looks for finished samples every two seconds, which is most of a step when generation takes less. Choose it with::

    trainer.v1.sampler.custom_sampler.path=pkg://verl_workflow.verl_plugin.sampler
    trainer.v1.sampler.custom_sampler.name=FastReplayBuffer
    +trainer.v1.sampler.sampler_kwargs.poll_interval=0.05
"""

from __future__ import annotations

from typing import Any

from verl.trainer.ppo.v1.replay_buffer import ReplayBuffer

__all__ = ["FastReplayBuffer"]

POLL_INTERVAL_S = 0.05


class FastReplayBuffer(ReplayBuffer):
    """verl's replay buffer for synchronous training with a poll interval of its own.

    Settings in ``trainer.v1.sampler.sampler_kwargs``:
        poll_interval: seconds between two looks, 0.05 by default.
        train_batch_size, gen_batch_size: as in ``data``; verl tells them to its own buffers only, and they matter only
            where groups are refilled (`gen_batch_size` is `train_batch_size` by default).
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        settings = kwargs.get("sampler_kwargs") or {}
        kwargs.setdefault("poll_interval", float(settings.get("poll_interval", POLL_INTERVAL_S)))
        train = settings.get("train_batch_size")
        if train:
            kwargs.setdefault("train_batch_size", int(train))
            kwargs.setdefault("gen_batch_size", int(settings.get("gen_batch_size", train)))
        super().__init__(*args, **kwargs)
