"""What a stage's things are called on the cluster, so that they are known to be its own, and nobody else's."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    # The pipeline runs stages; importing it here would close the circle.
    from verl_workflow.pipeline._context import StageContext

# Ray's namespace of all named actors that are ours and of no one job.
NAMESPACE = "verl_workflow"
_GROUPS = "held_groups"
_JOB = "verl_training"
_OWNER = re.compile(r"\d+\.\d+")


@dataclass(frozen=True, kw_only=True)
class StageName:
    """A verl stage of a run, over all its attempts and drivers.

    Attributes:
        incarnation: tells runs of one id apart, of which the earlier was deleted, and those of several storages.
    """

    run_id: str
    incarnation: str
    stage: str

    @classmethod
    def of(cls, ctx: StageContext) -> StageName:
        return cls(run_id=ctx.run_id, incarnation=ctx.records.rpartition("/")[2], stage=ctx.stage)

    @property
    def holder(self) -> str:
        """Name of the actor that holds its placement groups."""
        return f"{_GROUPS}:{self._text}"

    @property
    def groups(self) -> str:
        """How names of its placement groups begin."""
        return f"{NAMESPACE}:{self._text}:"

    def job(self, owner: str) -> str:
        """Ray's namespace of the job in which an attempt trains: its named actors are met by no other job."""
        return f"{_JOB}:{self._text}:{owner}"

    def __str__(self) -> str:
        return f"run {self.run_id}, stage {self.stage}"

    @property
    def _text(self) -> str:
        return f"{self.run_id}:{self.incarnation}:{self.stage}"


def stage_of_holder(name: str) -> StageName | None:
    """Whose placement groups an actor of this name holds; None when it is something else."""
    return _parsed(name, _GROUPS)


def stage_of_group(name: str) -> StageName | None:
    """Whose a placement group of this name is."""
    return _parsed(name.rpartition(":")[0], NAMESPACE)


def stage_of_job(namespace: str) -> tuple[StageName, str] | None:
    """Whose training runs in a job of this namespace, and how that attempt signs."""
    text, _, owner = namespace.rpartition(":")
    stage = _parsed(text, _JOB)
    return (stage, owner) if stage is not None and _OWNER.fullmatch(owner) else None


def _parsed(text: str, kind: str) -> StageName | None:
    begin, _, rest = text.partition(":")
    parts = rest.rsplit(":", 2)
    if begin != kind or len(parts) != 3:
        return None
    return StageName(run_id=parts[0], incarnation=parts[1], stage=parts[2])
