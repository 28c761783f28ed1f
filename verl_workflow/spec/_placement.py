"""How a training comes to its place on the cluster."""

from __future__ import annotations

import re
from typing import Annotated, Any

from pydantic import AfterValidator, PositiveFloat, PositiveInt, model_validator

from verl_workflow.spec._fields import Input, Strict

_WORD = r"[a-zA-Z0-9]([a-zA-Z0-9_.-]{0,61}[a-zA-Z0-9])?"
_SELECTOR = re.compile(rf"!?(in\({_WORD}(, ?{_WORD})*\)|{_WORD})")
_PARAM = "${"
_NOT_APART = {
    "trainer": "the trainer's GPUs are the stage's own nodes and gpus_per_node",
    "actor": "the trainer's GPUs are the stage's own nodes and gpus_per_node",
    "reference": "verl trains actor, critic and reference on the same GPUs: the reference can have none of its own",
    "critic": "verl trains actor, critic and reference on the same GPUs: the critic can have none of its own",
}


def _selector(text: str) -> str:
    if _PARAM not in text and not _SELECTOR.fullmatch(text):
        raise ValueError("should be a label's value, such as a100, or one of Ray's forms !a100, in(a, b), !in(a, b)")
    return text


Selector = Annotated[str, AfterValidator(_selector)]


class Pool(Strict):
    """GPUs for one part of a training alone.

    Attributes:
        nodes, gpus_per_node: how many; each node's share lies on one node.
        accelerator, labels: as in `Placement`, whose they are by default.
    """

    nodes: PositiveInt = 1
    gpus_per_node: PositiveInt
    accelerator: Input | None = None
    labels: dict[str, Selector] | None = None


class Placement(Strict):
    """Where a training runs, and how long it waits for its place, in seconds. While it waits, it shows for what.

    Its GPUs, with the CPUs that verl asks for beside them, are reserved before verl starts and kept between its
    attempts. verl's transfer queue takes further CPUs beside them.

    Attributes:
        turn: seconds for its turn, for two trainings on one cluster would destroy each other; by default as long as it
            takes.
        room: until what it needs is free on the nodes; then the attempt fails of class ``capacity``.
        autoscaled: whether the cluster grows by itself. Then a need that no node there could ever hold is asked of it
            and waited for; otherwise it is an error at once.
        accelerator: type of its GPUs by Ray's name: ``H200``, ``A100``.
        labels: labels of its nodes, in Ray's forms: ``{zone: a}``, ``{zone: "in(a, b)"}``, ``{market: "!spot"}``.
        rollout: GPUs for generation alone, beside the trainer's `nodes` and `gpus_per_node` (verl's separate_async).
            Needs vllm or sglang.
        reward: GPUs for a reward model alone, where `overrides` set one (``reward.reward_model.enable``).
    """

    turn: PositiveFloat | None = None
    room: PositiveFloat = 600.0
    autoscaled: bool = False
    accelerator: Input | None = None
    labels: dict[str, Selector] = {}
    rollout: Pool | None = None
    reward: Pool | None = None

    @model_validator(mode="before")
    @classmethod
    def _only_what_verl_can(cls, value: Any) -> Any:
        for name, why in _NOT_APART.items():
            if isinstance(value, dict) and name in value:
                raise ValueError(f"{name} is no pool: {why}")
        return value
