"""Room on the Ray cluster: whether a training fits, and whose turn it is."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from verl_workflow.errors import ErrorCode, UserError, VerlWorkflowError
from verl_workflow.training._names import NAMESPACE, StageName, stage_of_holder
from verl_workflow.training._nodes import Need, Node, shortage

QUEUE_ACTOR = ("transfer_queue", "TransferQueueController")
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


def cluster_nodes() -> list[Node]:
    """The cluster's nodes; what the calling step itself holds counts as unused."""
    import ray
    from ray._private.state import state

    free = state.available_resources_per_node()
    here = ray.get_runtime_context().get_node_id()
    own = ray.get_runtime_context().get_assigned_resources() if _in_worker() else {}
    nodes = []
    for node in ray.nodes():
        if node["Alive"]:
            total, unused = node["Resources"], free.get(node["NodeID"], {})
            held = own.get("CPU", 0) if node["NodeID"] == here else 0
            nodes.append(
                Node(
                    name=node["NodeManagerAddress"],
                    cpus=total.get("CPU", 0) - held,
                    gpus=total.get("GPU", 0),
                    free_cpus=unused.get("CPU", 0),
                    free_gpus=unused.get("GPU", 0),
                    id=node["NodeID"],
                    labels=node.get("Labels") or {},
                    resources=frozenset(name for name, amount in total.items() if amount > 0),
                )
            )
    return _apart(nodes)


def require_fit(need: Need, nodes: Sequence[Node]) -> None:
    """Raise UserError(CAPACITY) unless the nodes, were they idle, could hold the training.

    verl waits for its placement groups without a limit, so this must be known before it starts.
    """
    if missing := shortage(need, nodes, idle=True):
        raise UserError(
            ErrorCode.CAPACITY,
            f"the training does not fit on the cluster: {missing}",
            remedy="Add nodes, start Ray with more --num-cpus (and one logical GPU, --num-gpus=1, on a machine "
            "without accelerators), ask for fewer GPUs, or say `placement: {autoscaled: true}` if nodes come by "
            "themselves.",
        )


@contextlib.contextmanager
def training_lease(
    holder: str, report: Report, *, timeout: float | None = None, stage: StageName | None = None
) -> Iterator[None]:
    """Be the only training on the cluster: verl's transfer queue is one named actor, and a second run would kill the
    first one's.

    It is another stage's turn also between two of its attempts, as long as it holds GPUs.

    Args:
        holder: shown to whoever waits.
        stage: whose turn it is to be.
        timeout: seconds to wait for the turn; by default as long as it takes.

    Raises:
        VerlWorkflowError: CAPACITY, retryable, when the turn did not come in time.
    """
    deadline = None if timeout is None else time.monotonic() + timeout
    lease: Any = None
    try:
        while True:
            between = _between_attempts(stage)
            if lease is None and between is None:
                lease = _take(holder)
                # Whoever has had its turn meanwhile has shown itself by then.
                between = _between_attempts(stage)
            if lease is not None and between is not None:
                _release(lease)
                lease = None
            if lease is not None and not _queue_is_up():
                break
            other = between or ("a verl run that is not one of these pipelines" if lease is not None else _holder())
            if deadline is not None and time.monotonic() > deadline:
                raise VerlWorkflowError(
                    ErrorCode.CAPACITY,
                    f"the cluster was busy with another training for {timeout:.0f} s (placement.turn)",
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


def no_room_in_time(need: Need, missing: str, timeout: float) -> VerlWorkflowError:
    """The error of a training that has waited for room for `timeout` seconds."""
    return VerlWorkflowError(
        ErrorCode.CAPACITY,
        f"the cluster did not become free for {timeout:.0f} s (placement.room): the training waits for {need}, and "
        f"{missing}",
        remedy="Stop what uses them, or add nodes.",
        retryable=True,
    )


def _apart(nodes: list[Node]) -> list[Node]:
    """Nodes of one address (several on a machine) get names of their own."""
    named: list[Node] = []
    for node in nodes:
        alike = sum(other.name == node.name for other in nodes)
        number = 1 + sum(other.name.partition("#")[0] == node.name for other in named)
        named.append(replace(node, name=f"{node.name}#{number}") if alike > 1 else node)
    return named


def _in_worker() -> bool:
    import ray

    return bool(ray.get_runtime_context().worker.mode == ray.WORKER_MODE)


def _queue_is_up() -> bool:
    import ray.util

    return any(
        (actor["namespace"], actor["name"]) == QUEUE_ACTOR for actor in ray.util.list_named_actors(all_namespaces=True)
    )


def _between_attempts(stage: StageName | None) -> str | None:
    """Another stage that holds GPUs for its next attempt."""
    import ray.util

    named = ray.util.list_named_actors(all_namespaces=True)
    holders = (stage_of_holder(one["name"]) for one in named if one["namespace"] == NAMESPACE)
    other = next((found for found in holders if found not in (None, stage)), None)
    return None if other is None else f"{other}, which holds GPUs for its attempts"


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
        lease = actor.options(name=_LEASE, namespace=NAMESPACE).remote(f"{holder} (pid {os.getpid()})")
    except ValueError:
        # Ray's word for "the name is taken".
        return None
    ray.wait([lease.holder.remote()], timeout=_ANSWER_SECONDS)
    return lease


def _holder() -> str:
    import ray

    try:
        actor = ray.get_actor(_LEASE, namespace=NAMESPACE)
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
        if not any((one["namespace"], one["name"]) == (NAMESPACE, _LEASE) for one in named):
            return
        time.sleep(0.05)
