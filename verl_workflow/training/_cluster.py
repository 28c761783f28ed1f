"""Room on the Ray cluster: whether a training fits, and whose turn it is."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from verl_workflow.errors import ErrorCode, UserError, VerlWorkflowError

_QUEUE_ACTOR = ("transfer_queue", "TransferQueueController")
_LEASE_NAMESPACE = "verl_workflow"
_LEASE = "training_lease"
# Ray gives a name away at once and starts the process behind it in its own time: seconds, on a busy node.
_ANSWER_SECONDS = 60.0
_POLL_SECONDS = 1.0

Report = Callable[[Mapping[str, Any]], None]


def cluster_device() -> str:
    """``cuda`` when a node tells Ray of a real accelerator, else ``cpu`` (logical GPUs do not count)."""
    import ray

    return "cuda" if any(name.startswith("accelerator_type:") for name in ray.cluster_resources()) else "cpu"


def verl_platform(device: str) -> str:
    """verl's name for what the cluster trains on: ``cpu``, ``amd`` or ``nvidia``; ``VERL_PLATFORM`` wins on CUDA."""
    import ray

    if device == "cpu":
        return "cpu"
    if chosen := os.environ.get("VERL_PLATFORM", "").strip().lower():
        return chosen
    amd = any(name.startswith("accelerator_type:AMD") for name in ray.cluster_resources())
    return "amd" if amd else "nvidia"


def require_fit(*, nodes: int, gpus_per_node: int, cpus: int) -> None:
    """Raise UserError(CAPACITY) unless the cluster, were it idle, could hold the training.

    verl waits for its placement groups without a limit, so this must be known before it starts.

    Args:
        cpus: in all; each node that takes GPUs must have three for each of them.
    """
    import ray

    alive = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    own = ray.get_runtime_context().get_assigned_resources() if _in_worker() else {}
    total = sum(node.get("CPU", 0) for node in alive) - own.get("CPU", 0)
    gpus = sum(node.get("GPU", 0) for node in alive)
    missing: list[str] = []
    if gpus < nodes * gpus_per_node:
        missing.append(f"{nodes * gpus_per_node} GPUs are needed and the cluster has {gpus:g}")
    if total < cpus:
        missing.append(f"{cpus} CPUs are needed and the cluster has {total:g} for it")
    if not missing:
        fitting = sum(node.get("GPU", 0) >= gpus_per_node and node.get("CPU", 0) >= 3 * gpus_per_node for node in alive)
        if fitting < nodes:
            missing.append(
                f"{nodes} nodes with {gpus_per_node} GPUs and {3 * gpus_per_node} CPUs each are needed and "
                f"the cluster has {fitting}"
            )
    if missing:
        raise UserError(
            ErrorCode.CAPACITY,
            "the training does not fit on the cluster: " + "; ".join(missing),
            remedy="Add nodes, start Ray with more --num-cpus (and one logical GPU, --num-gpus=1, on a machine "
            "without accelerators), or ask for fewer GPUs.",
        )


@contextlib.contextmanager
def training_lease(holder: str, report: Report, *, timeout: float = 600.0) -> Iterator[None]:
    """Be the only training on the cluster: verl's transfer queue is one named actor, and a second run would kill the
    first one's.

    Args:
        holder: shown to whoever waits.
        timeout: seconds to wait for the turn.

    Raises:
        VerlWorkflowError: CAPACITY, retryable, when the turn did not come in time.
    """
    deadline = time.monotonic() + timeout
    lease: Any = None
    try:
        while True:
            if lease is None:
                lease = _take(holder)
            if lease is not None and not _queue_is_up():
                break
            other = "a verl run that is not one of these pipelines" if lease is not None else _holder()
            if time.monotonic() > deadline:
                raise VerlWorkflowError(
                    ErrorCode.CAPACITY,
                    f"the cluster was busy with another training for {timeout:.0f} s",
                    value=other,
                    remedy="Wait for it to end, stop it, or use another cluster.",
                    retryable=True,
                )
            report({"phase": f"waiting: the cluster trains {other}"})
            time.sleep(_POLL_SECONDS)
        yield
    finally:
        if lease is not None:
            _release(lease)


def wait_for_room(cpus: int, gpus: int, report: Report, *, timeout: float = 600.0) -> None:
    """Wait until that much is unused.

    Raises:
        VerlWorkflowError: CAPACITY, retryable, when it is not within `timeout` seconds.
    """
    import ray

    deadline = time.monotonic() + timeout
    while True:
        free = ray.available_resources()
        if free.get("CPU", 0) >= cpus and free.get("GPU", 0) >= gpus:
            return
        state = f"{cpus} CPUs and {gpus} GPUs ({free.get('CPU', 0):g} and {free.get('GPU', 0):g} are free)"
        if time.monotonic() > deadline:
            raise VerlWorkflowError(
                ErrorCode.CAPACITY,
                f"the cluster did not become free for {timeout:.0f} s: the training waits for {state}",
                remedy="Stop what uses them, or add nodes.",
                retryable=True,
            )
        report({"phase": f"waiting for {state}"})
        time.sleep(_POLL_SECONDS)


def _in_worker() -> bool:
    import ray

    return bool(ray.get_runtime_context().worker.mode == ray.WORKER_MODE)


def _queue_is_up() -> bool:
    import ray.util

    return any(
        (actor["namespace"], actor["name"]) == _QUEUE_ACTOR for actor in ray.util.list_named_actors(all_namespaces=True)
    )


class _Lease:
    """Lives as long as the process that made it: no lease outlives its holder."""

    def __init__(self, holder: str) -> None:
        self._holder = holder

    def holder(self) -> str:
        return self._holder


def _take(holder: str) -> Any:
    import ray

    actor = ray.remote(num_cpus=0, max_concurrency=4)(_Lease)
    try:
        lease = actor.options(name=_LEASE, namespace=_LEASE_NAMESPACE).remote(f"{holder} (pid {os.getpid()})")
    except ValueError:
        # Ray's word for "the name is taken".
        return None
    ray.wait([lease.holder.remote()], timeout=_ANSWER_SECONDS)
    return lease


def _holder() -> str:
    import ray

    try:
        actor = ray.get_actor(_LEASE, namespace=_LEASE_NAMESPACE)
        return str(ray.get(actor.holder.remote(), timeout=_ANSWER_SECONDS))
    except (ValueError, ray.exceptions.RayError):
        return "another run"


def _release(lease: Any) -> None:
    import ray

    ray.kill(lease)
    # The name is free only when the actor is seen to be gone.
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        named = ray.util.list_named_actors(all_namespaces=True)
        if not any((one["namespace"], one["name"]) == (_LEASE_NAMESPACE, _LEASE) for one in named):
            return
        time.sleep(0.05)
