"""The Ray jobs of trainings, as the cluster sees them: their actors, and whether nodes of theirs are taken away."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from verl_workflow.training._names import StageName, stage_of_job

# Each look asks the head; a preemption notice comes half a minute or more ahead.
_LOOK_SECONDS = 5.0
_ANSWER_SECONDS = 30.0


@dataclass(frozen=True, kw_only=True)
class TrainingJob:
    """A Ray job in which an attempt of ours trains.

    Attributes:
        id: Ray's, in hex. owner: how the attempt signs. node: id of its driver's node. pid: of its driver there.
        began: Unix time. dead: whether its driver has ended.
    """

    id: str
    stage: StageName
    owner: str
    node: str
    pid: int
    began: float
    dead: bool

    @property
    def namespace(self) -> str:
        """Ray's, of the job."""
        return self.stage.job(self.owner)


def training_jobs() -> list[TrainingJob]:
    """All jobs of ours that the cluster knows of, the dead ones too."""
    from ray._private.worker import global_worker

    table = global_worker.gcs_client.get_all_job_info(
        skip_submission_job_info_field=True, skip_is_running_tasks_field=True, timeout=_ANSWER_SECONDS
    )
    jobs = []
    for entry in table.values():
        named = stage_of_job(entry.config.ray_namespace)
        if named is not None:
            jobs.append(
                TrainingJob(
                    id=entry.job_id.hex(),
                    stage=named[0],
                    owner=named[1],
                    node=entry.driver_address.node_id.hex(),
                    pid=entry.driver_pid,
                    began=entry.start_time / 1000,
                    dead=entry.is_dead,
                )
            )
    return jobs


def actors_of(namespace: str) -> Mapping[str, Mapping[str, Any]]:
    """Ray's facts on the actors of the living job of this namespace, by actor id; empty when there is none.

    Raises ray.exceptions.RayError, or what Ray's client raises, when the head does not answer.
    """
    import ray
    from ray._private.state import state

    job = next((job for job in training_jobs() if not job.dead and job.namespace == namespace), None)
    if job is None:
        return {}
    found: Mapping[str, Mapping[str, Any]] = state.actor_table(None, ray.JobID.from_hex(job.id))
    return found


@dataclass(kw_only=True)
class DrainWatch:
    """Notices that a node of the training is being drained: Ray's word for one that is about to be taken away.

    Attributes:
        namespace: of the Ray job in which it trains.
    """

    namespace: str
    _looked: float = field(default=0.0, init=False)

    def draining(self) -> tuple[str, ...]:
        """Ids of such nodes; asks the head every five seconds, and takes its silence for none."""
        if time.monotonic() - self._looked < _LOOK_SECONDS:
            return ()
        self._looked = time.monotonic()
        try:
            from ray._private.state import state

            leaving = state.get_draining_nodes()
            used = {actor["Address"]["NodeID"] for actor in actors_of(self.namespace).values()} if leaving else set()
        except Exception:  # noqa: BLE001 - a head that is lost ends the training by itself
            return ()
        return tuple(sorted(used & set(leaving)))
