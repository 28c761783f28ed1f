"""What is known of a training's Ray job, on two real nodes of which one is taken away."""

from __future__ import annotations

import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from typing import Any

import pytest

from verl_workflow.training import _job
from verl_workflow.training._job import DrainWatch, actors_of
from verl_workflow.training._names import StageName

STAGE = StageName(run_id="night", incarnation="0123456789abcdef", stage="train")
DRIVER = """
    import sys, time, ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    ray.init(address=sys.argv[1], namespace=sys.argv[2], log_to_driver=False)

    @ray.remote(num_cpus=0, scheduling_strategy=NodeAffinitySchedulingStrategy(sys.argv[3], soft=False))
    class Worker:
        def ping(self):
            pass

    worker = Worker.remote()
    ray.get(worker.ping.remote())
    print("up", flush=True)
    time.sleep(3600)
"""


@pytest.fixture
def nodes() -> Iterator[list[str]]:
    """Ids of a cluster's two nodes, of which the first has the head."""
    import ray
    from ray.cluster_utils import Cluster

    found = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
    ray.init(address=found.address, log_to_driver=False)
    head = {node["NodeID"] for node in ray.nodes()}
    found.add_node(num_cpus=1)
    try:
        yield [*head, *({node["NodeID"] for node in ray.nodes()} - head)]
    finally:
        ray.shutdown()
        found.shutdown()


@pytest.fixture
def drivers(nodes: list[str]) -> Iterator[list[str]]:
    """Namespaces of two trainings, one with its worker on each node."""
    import ray

    started, namespaces = [], [STAGE.job(f"1.{number}") for number in (1, 2)]
    for namespace, node in zip(namespaces, nodes, strict=True):
        words = [sys.executable, "-c", textwrap.dedent(DRIVER), ray.get_runtime_context().gcs_address, namespace, node]
        started.append(subprocess.Popen(words, stdout=subprocess.PIPE, text=True))
    for process in started:
        assert process.stdout is not None
        assert process.stdout.readline() == "up\n"
    yield namespaces
    for process in started:
        process.kill()
        process.wait()


def drain(node: str) -> None:
    """As a cloud does that wants its machine back in two minutes."""
    from ray._private.worker import global_worker
    from ray.core.generated import autoscaler_pb2

    reason = autoscaler_pb2.DrainNodeReason.Value("DRAIN_NODE_REASON_PREEMPTION")
    deadline = int((time.time() + 120) * 1000)
    client: Any = global_worker.gcs_client
    accepted, why = client.drain_node(node, reason, "spot instance", deadline)
    assert accepted, why


def test_a_node_of_the_training_that_is_drained_is_noticed(
    nodes: list[str], drivers: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_job, "_LOOK_SECONDS", 0.0)
    here, there = (DrainWatch(namespace=namespace) for namespace in drivers)
    assert [watch.draining() for watch in (here, there)] == [(), ()]
    drain(nodes[1])
    deadline = time.monotonic() + 60
    while not (found := there.draining()):
        assert time.monotonic() < deadline, "it is not noticed"
        time.sleep(0.1)
    assert found == (nodes[1],)
    assert here.draining() == (), "the other training has nothing on that node"


def test_the_actors_of_a_training_are_those_of_its_own_job(nodes: list[str], drivers: list[str]) -> None:
    for namespace, node in zip(drivers, nodes, strict=True):
        [actor] = actors_of(namespace).values()
        assert actor["Address"]["NodeID"] == node
    assert actors_of(STAGE.job("9.9")) == {}
