"""The Ray job of verl's process, as the cluster sees it: its actors, and whether nodes of it are taken away."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

# Each look asks the head; a preemption notice comes half a minute or more ahead.
_LOOK_SECONDS = 5.0


def actors_of(pid: int) -> Mapping[str, Mapping[str, Any]]:
    """Ray's facts on the actors of the job whose driver has this pid on this node, by actor id; empty when there is
    none.

    Raises ray.exceptions.RayError, or what Ray's client raises, when the head does not answer.
    """
    import ray
    from ray._private.state import state

    here = ray.util.get_node_ip_address()
    jobs = [
        job["JobID"]
        for job in state.job_table()
        if job["DriverPid"] == pid and job["DriverIPAddress"] == here and not job["IsDead"]
    ]
    if not jobs:
        return {}
    found: Mapping[str, Mapping[str, Any]] = state.actor_table(None, ray.JobID.from_hex(jobs[-1]))
    return found


@dataclass(kw_only=True)
class DrainWatch:
    """Notices that a node of the training is being drained: Ray's word for one that is about to be taken away."""

    pid: int
    _looked: float = field(default=0.0, init=False)

    def draining(self) -> tuple[str, ...]:
        """Ids of such nodes; asks the head every five seconds, and takes its silence for none."""
        if time.monotonic() - self._looked < _LOOK_SECONDS:
            return ()
        self._looked = time.monotonic()
        try:
            from ray._private.state import state

            leaving = state.get_draining_nodes()
            used = {actor["Address"]["NodeID"] for actor in actors_of(self.pid).values()} if leaving else set()
        except Exception:  # noqa: BLE001 - a head that is lost ends the training by itself
            return ()
        return tuple(sorted(used & set(leaving)))
