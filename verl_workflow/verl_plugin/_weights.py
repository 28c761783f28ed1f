"""Puts weights that come in parts into a model, and tells when they are not the model's."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from verl_workflow.errors import ErrorCode, VerlWorkflowError


class WeightLoader:
    """Copies named tensors into a model's parameters and buffers, in place.

    Tied parameters may come under any one of their names, or under several.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        self._parameters = dict(model.named_parameters(remove_duplicate=False))
        self._targets: dict[str, torch.Tensor] = {**dict(model.named_buffers()), **self._parameters}
        self._loaded: set[int] = set()

    @torch.no_grad()
    def load(self, items: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Copy these in.

        Raises:
            VerlWorkflowError: `model_invalid`, a name is unknown to the model or a shape differs.
        """
        for name, value in items:
            target = self._targets.get(name)
            if target is None:
                raise _mismatch("an unexpected weight was sent to the rollout", name)
            if target.shape != value.shape:
                # copy_ would stretch a smaller tensor without a word.
                shapes = f"{tuple(value.shape)} for {tuple(target.shape)}"
                raise _mismatch("a weight of another shape was sent to the rollout", f"{name}: {shapes}")
            target.copy_(value)
            self._loaded.add(id(target))

    def finish(self) -> None:
        """End one transfer; the next one starts from nothing.

        Raises:
            VerlWorkflowError: `model_invalid`, a parameter was not sent.
        """
        missing = [name for name, value in self._parameters.items() if id(value) not in self._loaded]
        self._loaded.clear()
        if missing:
            raise _mismatch(f"{len(missing)} weights were not sent to the rollout", missing[:5])


def _mismatch(what: str, value: Any) -> VerlWorkflowError:
    return VerlWorkflowError(
        ErrorCode.MODEL_INVALID,
        what,
        value=value,
        remedy="The trainer and the rollout must be given the same model.path and override_config",
    )
