"""What attempts that are dead have left on the cluster is found by its names, and removed; never what is another's."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Mapping
from typing import Any

from verl_workflow.errors import VerlWorkflowError
from verl_workflow.training._cluster import QUEUE_ACTOR
from verl_workflow.training._job import TrainingJob, training_jobs
from verl_workflow.training._names import NAMESPACE, StageName, stage_of_group, stage_of_holder, stage_of_job
from verl_workflow.training._owner import is_later

_log = logging.getLogger(__name__)
_ANSWER_SECONDS = 30.0
# Ray takes a job's actors and groups away about two seconds after its driver.
_GONE_SECONDS = 20.0
_POLL_SECONDS = 0.2


def reap(stage: StageName, owner: str, *, storage: str) -> list[str]:
    """Remove what earlier attempts at this stage, and runs of this storage that are over, have left on the cluster.

    These are drivers of earlier attempts that live on, with their actors; named actors of dead jobs of ours; placement
    groups that nobody holds; and holders of the GPUs of runs that have ended. Call it before the attempt `owner` starts
    anything.

    Returns:
        A sentence for each thing that was removed.
    """
    return [
        *_end_earlier_attempts(stage, owner),
        *_end_actors_of_dead_jobs(),
        *_give_up_ended_runs(stage, storage),
        *_remove_groups_without_holder(),
    ]


def _end_earlier_attempts(stage: StageName, owner: str) -> Iterator[str]:
    """Their drivers die with their supervisors, unless their node was cut off or they were started otherwise."""
    for job in training_jobs():
        if job.dead or job.stage != stage or not is_later(owner, job.owner):
            continue
        if _end_driver(job) and _is_over(job):
            yield f"attempt {job.owner} still trained (job {job.id}): it was ended"
        else:
            _log.warning("attempt %s of %s still trains on node %s and cannot be ended", job.owner, stage, job.node)


def _end_driver(job: TrainingJob) -> bool:
    """Whether its process is gone; asked of a task on its node."""
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    there = NodeAffinitySchedulingStrategy(node_id=job.node, soft=False)
    end = ray.remote(num_cpus=0, max_retries=0)(end_process).options(scheduling_strategy=there)
    try:
        return bool(ray.get(end.remote(job.pid, job.began), timeout=_ANSWER_SECONDS))
    except ray.exceptions.RayError as error:
        # Of a node that is lost, Ray ends the jobs itself.
        _log.info("nobody answers on node %s: %s", job.node, error)
        return False


def end_process(pid: int, began: float) -> bool:
    """Kill a process of this machine unless it is younger than `began` (Unix time): then the id is another's by now.

    Returns:
        Whether it is gone.
    """
    import psutil

    try:
        process = psutil.Process(pid)
        if process.create_time() > began + 1.0:
            return True
        process.kill()
        deadline = time.monotonic() + _GONE_SECONDS
        # A zombie does nothing any more, whenever its parent looks after it.
        while process.status() != psutil.STATUS_ZOMBIE:
            if time.monotonic() > deadline:
                return False
            time.sleep(_POLL_SECONDS)
    except psutil.NoSuchProcess:
        return True
    except psutil.AccessDenied:
        return False
    return True


def _is_over(job: TrainingJob) -> bool:
    """Whether Ray has seen the job's end, in time."""
    deadline = time.monotonic() + _GONE_SECONDS
    while time.monotonic() < deadline:
        if all(other.dead for other in training_jobs() if other.id == job.id):
            return True
        time.sleep(_POLL_SECONDS)
    return False


def _end_actors_of_dead_jobs() -> Iterator[str]:
    import ray.util

    # In this order: a job that begins in between cannot be taken for a dead one.
    named = ray.util.list_named_actors(all_namespaces=True)
    jobs = {job.id: job for job in training_jobs()}
    alive = {job.namespace for job in jobs.values() if not job.dead}
    for actor in named:
        name, namespace = actor["name"], actor["namespace"]
        ours = stage_of_job(namespace) is not None and namespace not in alive
        if (namespace, name) == QUEUE_ACTOR:
            ours = any(job.dead for job in (jobs.get(_job_of(name)),) if job is not None)
        if ours and _kill(name, namespace):
            yield f"the actor {name} was left by a training that has ended: it was ended"


def _job_of(name: str) -> str:
    """Id of the job that a living actor of this name belongs to."""
    from ray._private.state import state

    found: Mapping[str, Mapping[str, Any]] = state.actor_table(None, None, "ALIVE")
    return next((str(actor["JobID"]) for actor in found.values() if actor["Name"] == name), "")


def _give_up_ended_runs(stage: StageName, storage: str) -> Iterator[str]:
    """GPUs that are held for attempts that will never be made."""
    import ray.util

    for actor in ray.util.list_named_actors(all_namespaces=True):
        held = stage_of_holder(actor["name"]) if actor["namespace"] == NAMESPACE else None
        if held is not None and held != stage and _has_ended(held, storage) and _kill(actor["name"], NAMESPACE):
            yield f"GPUs were still held for {held}, which is over: they were given back"


def _has_ended(stage: StageName, storage: str) -> bool:
    """Whether the run is one of this storage, and over."""
    from verl_workflow.storage import Store
    from verl_workflow.workflow import RunStatus, read_run

    try:
        run = read_run(Store(storage), stage.run_id)
    except VerlWorkflowError:
        # Another storage's, or deleted: nothing is known of it here.
        return False
    over = (RunStatus.SUCCEEDED, RunStatus.FAILED, RunStatus.CANCELLED)
    return run.incarnation == stage.incarnation and run.status in over


def _remove_groups_without_holder() -> Iterator[str]:
    import ray
    from ray.util.placement_group import PlacementGroup

    # In this order: a holder is there before its groups.
    groups = ray.util.placement_group_table()
    named = {one["name"] for one in ray.util.list_named_actors(all_namespaces=True) if one["namespace"] == NAMESPACE}
    for group in groups.values():
        stage = stage_of_group(group["name"])
        if stage is None or group["state"] == "REMOVED" or stage.holder in named:
            continue
        ray.util.remove_placement_group(PlacementGroup(ray.PlacementGroupID.from_hex(group["placement_group_id"])))
        yield f"a placement group of {stage} was left ({group['name']}): it was removed"


def _kill(name: str, namespace: str) -> bool:
    """Whether there was such an actor."""
    import ray

    try:
        ray.kill(ray.get_actor(name, namespace=namespace))
    except ValueError:
        # Ray's word for "there is none of that name": it has ended by itself.
        return False
    return True
