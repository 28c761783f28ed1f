"""Processes that have imported what takes long, on the nodes where trainings are going to start theirs."""

from __future__ import annotations

from pathlib import Path

from verl_workflow.warm import warm_up


def warm_nodes() -> Path | None:
    """See to it that each node with accelerators has a warm server, or each with CPUs where there are none.

    Returns at once; on nodes where it cannot be had, processes are started as without it. Call it in a process that is
    connected to Ray.

    Returns:
        The folder of this node's own server, by which the others go, too; None when it can have none.
    """
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    here = ray.get_runtime_context().get_node_id()
    nodes = [node for node in ray.nodes() if node["Alive"]]
    working = [node for node in nodes if node["Resources"].get("GPU")] or [
        node for node in nodes if node["Resources"].get("CPU")
    ]
    for node in working:
        if node["NodeID"] != here:
            there = NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
            ray.remote(num_cpus=0, max_retries=0)(warm_up).options(scheduling_strategy=there).remote()
    return warm_up()
