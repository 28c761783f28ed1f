from __future__ import annotations

import threading
import time
from typing import Any

import pytest

from verl_workflow.errors import ErrorCode, UserError, VerlWorkflowError
from verl_workflow.training._cluster import (
    cluster_device,
    cluster_nodes,
    require_fit,
    training_lease,
    verl_platform,
)
from verl_workflow.training._nodes import Group, Need

pytestmark = pytest.mark.usefixtures("ray_cluster")


def need(gpus: int, single: int = 0) -> Need:
    return Need(groups=(Group(gpus=gpus),), single=single)


def silent(_: Any) -> None:
    pass


def test_logical_gpus_are_no_accelerator() -> None:
    assert cluster_device() == "cpu"


@pytest.mark.parametrize(
    ("resources", "device", "platform"),
    [
        ({"CPU": 8, "GPU": 1}, "cpu", "cpu"),
        ({"GPU": 8, "accelerator_type:H200": 1}, "cuda", "nvidia"),
        ({"GPU": 8, "accelerator_type:AMD-Instinct-MI300X-OAM": 1}, "cuda", "amd"),
    ],
)
def test_the_cluster_decides_what_verl_trains_on(
    monkeypatch: pytest.MonkeyPatch, resources: dict[str, float], device: str, platform: str
) -> None:
    monkeypatch.delenv("VERL_PLATFORM", raising=False)
    monkeypatch.setattr("ray.cluster_resources", lambda: resources)
    assert cluster_device() == device
    assert verl_platform(device) == platform


def test_a_platform_that_was_named_wins_on_an_accelerator(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VERL_PLATFORM", "metax")
    assert verl_platform("cuda") == "metax"
    assert verl_platform("cpu") == "cpu"


def test_what_is_missing_is_named() -> None:
    nodes = cluster_nodes()
    require_fit(need(1, single=5), nodes)
    with pytest.raises(UserError, match="9 CPUs are needed and the cluster has 8") as caught:
        require_fit(need(1, single=6), nodes)
    assert caught.value.code is ErrorCode.CAPACITY
    with pytest.raises(UserError, match=r"has 8 CPUs and 1 GPUs: bundle 2 of 2 lacks a GPU"):
        require_fit(need(2), nodes)


def test_a_node_is_known_by_what_ray_says_of_it() -> None:
    import ray

    [node] = cluster_nodes()
    assert node.id == ray.get_runtime_context().get_node_id()
    assert node.labels["ray.io/node-id"] == node.id
    assert {"CPU", "GPU"} <= node.resources
    assert node.accelerators == ()


def test_only_one_training_at_a_time_and_the_next_sees_whose_turn_it_is() -> None:
    seen: list[Any] = []
    waiting, entered = threading.Event(), threading.Event()

    def report(progress: Any) -> None:
        seen.append(progress["phase"])
        waiting.set()

    def second() -> None:
        with training_lease("run two", report):
            entered.set()

    with training_lease("run one", silent):
        thread = threading.Thread(target=second)
        thread.start()
        assert waiting.wait(60)
        assert not entered.is_set()
    assert entered.wait(60)
    thread.join()
    assert "run one" in seen[0]


def test_waiting_for_the_turn_ends() -> None:
    with (
        training_lease("run one", silent),
        pytest.raises(VerlWorkflowError, match="run one") as caught,
        training_lease("run two", silent, timeout=0.1),
    ):
        pass
    assert caught.value.code is ErrorCode.CAPACITY
    assert caught.value.retryable


def test_who_waits_is_told_of_a_holder_whose_process_still_starts() -> None:
    import ray

    @ray.remote(num_cpus=0)
    class SlowToStart:
        def __init__(self) -> None:
            time.sleep(7)

        def holder(self) -> str:
            return "run one"

    lease = SlowToStart.options(name="training_lease", namespace="verl_workflow").remote()
    with (
        pytest.raises(VerlWorkflowError, match="run one"),
        training_lease("run two", silent, timeout=0.1),
    ):
        pass
    ray.kill(lease)
    with training_lease("run two", silent, timeout=60):
        pass


def test_a_verl_run_of_somebody_else_is_waited_for() -> None:
    import ray

    @ray.remote(num_cpus=0)
    class Controller:
        def ping(self) -> None:
            pass

    other = Controller.options(name="TransferQueueController", namespace="transfer_queue").remote()
    ray.get(other.ping.remote())
    with (
        pytest.raises(VerlWorkflowError, match="not one of these pipelines"),
        training_lease("mine", silent, timeout=0.1),
    ):
        pass
    ray.kill(other)
    with training_lease("mine", silent, timeout=60):
        pass
