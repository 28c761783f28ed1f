"""A training run of verl, as it is written."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field, PositiveInt, model_validator

from verl_workflow.spec._fields import Input, JsonObject, Strict
from verl_workflow.spec._inputs import Reward
from verl_workflow.spec._placement import Placement
from verl_workflow.spec._retry import TrainingRetry
from verl_workflow.spec._stage import MatrixStage, Retry
from verl_workflow.spec._supervision import Deadlines, Guard
from verl_workflow.spec._trackers import Tracker


class KeepBest(Strict):
    """Checkpoints that stay because they are the best, besides the newest ones.

    Attributes:
        metric: ``reward``, or one of verl's metrics, such as ``val-core/my-data/acc/mean@1``; of a step at which it was
            not measured the newest value before counts.
        mode: ``max`` or ``min``. count: how many.
    """

    metric: Input = "reward"
    mode: Literal["max", "min"] = "max"
    count: PositiveInt = 1


def _with_budgets(value: Any) -> Any:
    return TrainingRetry(**value.model_dump()) if type(value) is Retry else value


class VerlStage(MatrixStage):
    """A training run of verl.

    Attributes:
        algorithm: ``grpo``, or ``ppo`` (GAE with a critic and a KL reference).
        model: what to start from: ``${model}``, another stage's model or a folder.
        extends: id of an earlier run in the same storage: training goes on from the last checkpoint of its stage of
            this name, with the optimizer and the order of the data, to a higher `steps`. Model, data, algorithm and
            world size have to be those of then. None or empty: from `model`.
        train, validation: parquet in verl's schema.
        steps: training steps planned; the stage succeeds only when the last one was reached.
        batch_size: prompts a step. rollouts: answers for each prompt (GRPO needs 2 or more).
        max_prompt_length, max_response_length: in tokens.
        learning_rate, critic_learning_rate, kl_coef: as in verl; `kl_coef` 0 turns the KL loss off for GRPO.
        save_every, test_every: in steps. keep: newest checkpoints kept, over all attempts (2 or more).
        keep_best: further ones that are kept because they are the best; the best one is the stage's output `best`.
        hand_on: whose model is handed on, that of the ``last`` step or the ``best`` one by `keep_best`.
        device: ``auto`` takes CUDA when the cluster has GPUs and else the CPU platform.
        rollout: ``hf`` (transformers), ``vllm`` or ``sglang``.
        nodes, gpus_per_node: the world size; on the CPU one rank.
        overrides: verl's own keys, dotted or nested; they win over the fields above. Those of what the run decides (its
            model, data, reward, steps, device, checkpoints) are refused.
        seed: of data order and sampling.
        retry: how often it is tried, by class of failure, and what may change between attempts.
        guards: conditions on the metrics; that losses and gradients are numbers is watched in any case.
        deadlines: how long it may take to move.
        warm_start: start its processes by forking one that has imported what takes long, begun while data is prepared
            and kept for further attempts. It holds about half a gigabyte of memory on each node where it runs.
        placement: on which nodes it runs, which parts have GPUs of their own, and how long it waits for its place.
        trackers: where its metrics are shown besides here; what befalls them never touches the training.
    """

    INPUTS: ClassVar[tuple[str, ...]] = ("model", "train", "validation")

    kind: Literal["verl"] = "verl"
    algorithm: Literal["grpo", "ppo"] = "grpo"
    model: Input = "${model}"
    extends: str | None = None
    train: Input
    validation: Input
    reward: Reward
    steps: PositiveInt
    batch_size: PositiveInt
    rollouts: PositiveInt = 4
    max_prompt_length: PositiveInt = 512
    max_response_length: PositiveInt = 512
    learning_rate: Annotated[float, Field(gt=0)] = 1e-6
    critic_learning_rate: Annotated[float, Field(gt=0)] = 1e-5
    kl_coef: Annotated[float, Field(ge=0)] = 0.001
    temperature: Annotated[float, Field(gt=0)] = 1.0
    save_every: PositiveInt | None = None
    test_every: PositiveInt | None = None
    keep: Annotated[int, Field(ge=2)] = 2
    keep_best: KeepBest | None = None
    hand_on: Literal["last", "best"] = "last"
    device: Literal["auto", "cpu", "cuda"] = "auto"
    rollout: Literal["hf", "vllm", "sglang"] = "hf"
    nodes: PositiveInt = 1
    gpus_per_node: PositiveInt = 1
    seed: int = 1
    overrides: JsonObject = {}
    retry: Annotated[TrainingRetry, BeforeValidator(_with_budgets)] = TrainingRetry()
    guards: list[Guard] = []
    deadlines: Deadlines = Deadlines()
    warm_start: bool = False
    placement: Placement = Placement()
    trackers: list[Tracker] = []

    @model_validator(mode="after")
    def _consistent(self) -> VerlStage:
        # Values that are params are checked once they are known.
        if self.algorithm == "grpo" and isinstance(self.rollouts, int) and self.rollouts < 2:
            raise ValueError("grpo compares answers to one prompt: rollouts must be 2 or more")
        if self.hand_on == "best" and self.keep_best is None:
            raise ValueError("hand_on is best but nothing says which one is: set keep_best")
        attempts = self.retry.attempts if isinstance(self.retry, Retry) else 1
        if isinstance(attempts, int) and attempts > 1 and self.save_every is None:
            raise ValueError(
                f"retry.attempts is {attempts} but nothing is saved to resume from: "
                "set save_every to 1 or more, or retry.attempts to 1"
            )
        return self
