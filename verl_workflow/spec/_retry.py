"""How often a training is tried, by what it failed of, and what may change between its attempts."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BeforeValidator, Field, NonNegativeInt, PositiveFloat, model_validator

from verl_workflow.spec._failure_class import FailureClass
from verl_workflow.spec._fields import Strict
from verl_workflow.spec._stage import Retry


def _named(value: object) -> object:
    """YAML gives names; pydantic's strict mode takes members alone."""
    if isinstance(value, str) and not isinstance(value, FailureClass):
        try:
            return FailureClass(value)
        except ValueError:
            raise ValueError(f"should be one of {', '.join(kind.value for kind in FailureClass)}") from None
    return value


Kind = Annotated[FailureClass, BeforeValidator(_named)]


class Change(Strict):
    """A setting that is made smaller for the next attempt when one has failed of `against`.

    Attributes:
        against: class of failure: ``memory.gpu``, ``memory.host``, ``memory.save`` or ``numeric``.
        setting: ``micro_batch`` (answers in a pass of actor, critic and reference; tokens in a pass where the batch
            size is dynamic), ``gpu_memory_utilization`` of the rollout, or ``learning_rate`` of the actor.
        times: what it is multiplied by; a micro batch becomes the next divisor below.
        at_least: never smaller than this; then the failure is final. By default 1 for a micro batch, and what three
            changes come to for the others.
    """

    against: Kind
    setting: Literal["micro_batch", "gpu_memory_utilization", "learning_rate"]
    times: Annotated[float, Field(gt=0, lt=1)] = 0.5
    at_least: PositiveFloat | None = None

    @model_validator(mode="after")
    def _of_use(self) -> Change:
        memory = {FailureClass.MEMORY_GPU, FailureClass.MEMORY_HOST, FailureClass.MEMORY_SAVE}
        suited = {FailureClass.NUMERIC} if self.setting == "learning_rate" else memory
        if isinstance(self.against, FailureClass) and self.against not in suited:
            names = ", ".join(sorted(kind.value for kind in suited))
            raise ValueError(f"a smaller {self.setting} helps against {names}, not against {self.against.value}")
        return self


class TrainingRetry(Retry):
    """How often a training is tried.

    A failure that the same attempt made again cannot mend (configuration, data, reward, disk, ...) is final at once.
    Others are tried again while fewer than `attempts` attempts have failed since the run was last taken up. An attempt
    that was lost with its driver, or preempted (its node was taken away on notice), does not count. Two attempts that
    fail alike at the same step, after having moved, are a crash loop, and final.

    Attributes:
        budgets: by class of failure, how many of its failures are tried again; by default ``attempts - 1`` for
            infrastructure, stall and checkpoint, 10 for capacity (which counts for no attempt), 1 for memory.host,
            tracker and unknown, 1 for numeric where a guard rolls back, and 0 for the rest.
        changes: what may change between attempts; nothing unless it is written here. The settings in force are in the
            attempt's record and in the failure that brought them about. A class with a change is tried again while the
            change can still be made.
    """

    budgets: dict[Kind, NonNegativeInt] = {}
    changes: list[Change] = []
