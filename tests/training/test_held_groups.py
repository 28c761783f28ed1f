"""The actor that holds a stage's placement groups, on a real Ray with 8 CPUs and one logical GPU."""

from __future__ import annotations

import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from verl_workflow.errors import ErrorCode, UserError, VerlWorkflowError
from verl_workflow.training._cluster import training_lease
from verl_workflow.training._held_groups import Bundles
from verl_workflow.training._names import NAMESPACE, StageName
from verl_workflow.training._nodes import Group, Need, Where
from verl_workflow.training._owner import OvertakenError
from verl_workflow.training._places import Places, _holder, kept_for_retries

pytestmark = pytest.mark.usefixtures("ray_cluster")

NEED = Need(groups=(Group(gpus=1),), dealt=1, single=1)
ONE = [Bundles.of(Group(gpus=1))]
LEASE = 60.0


@pytest.fixture
def stage(request: pytest.FixtureRequest) -> Iterator[StageName]:
    """A stage of the test's own, whose groups are gone afterwards."""
    name = StageName(run_id=request.node.name[:40], incarnation="0123456789abcdef", stage="train")
    until(lambda: free("GPU") == 1 and free("CPU") == 8, "what the test before has held is free")
    yield name
    Places(name, "99.99", LEASE).release()
    until(lambda: not held(name), "its GPUs are given back")


def held(name: StageName) -> dict[str, str]:
    """Ids of the stage's groups, with the state of each."""
    import ray

    table = ray.util.placement_group_table()
    return {
        one["placement_group_id"]: one["state"]
        for one in table.values()
        if one["name"].startswith(name.groups) and one["state"] != "REMOVED"
    }


def free(resource: str) -> float:
    import ray

    return float(ray.available_resources().get(resource, 0))


def until(ready: Callable[[], Any], what: str) -> None:
    deadline = time.monotonic() + 120
    while not ready():
        assert time.monotonic() < deadline, what
        time.sleep(0.1)


def silent(_: Any) -> None:
    pass


def is_there(name: StageName) -> bool:
    import ray

    return any(
        one == {"name": name.holder, "namespace": NAMESPACE} for one in ray.util.list_named_actors(all_namespaces=True)
    )


def test_what_an_attempt_reserves_the_next_one_takes_over(stage: StageName) -> None:
    first = Places(stage, "1.1", LEASE)
    groups = first.reserve(NEED, silent, timeout=60)
    until(lambda: free("GPU") == 0, "the GPU is reserved")
    first.leave()
    second = Places(stage, "1.2", LEASE)
    assert second.reserve(NEED, silent, timeout=60) == groups
    assert list(groups) == ["global_pool"]
    assert held(stage) == {groups["global_pool"][0]: "CREATED"}
    second.release()
    until(lambda: free("GPU") == 1, "the GPU is given back")
    assert not held(stage)
    until(lambda: not is_there(stage), "its holder has ended")


def test_what_the_next_attempt_does_not_want_is_replaced(stage: StageName) -> None:
    first = Places(stage, "1.1", LEASE)
    [before] = first.reserve(NEED, silent, timeout=60)["global_pool"]
    first.leave()
    smaller = Need(groups=(Group(gpus=1, cpus_a_gpu=2),))
    [after] = Places(stage, "1.2", LEASE).reserve(smaller, silent, timeout=60)["global_pool"]
    assert after != before
    assert held(stage) == {after: "CREATED"}


def test_an_earlier_attempt_neither_takes_nor_gives_back_what_a_later_one_has(stage: StageName) -> None:
    [group] = Places(stage, "2.3", LEASE).reserve(NEED, silent, timeout=60)["global_pool"]
    late = Places(stage, "1.9", LEASE)
    with pytest.raises(OvertakenError, match=r"attempt 2\.3 has the stage's GPUs"):
        late.reserve(NEED, silent, timeout=60)
    late.release()
    assert held(stage) == {group: "CREATED"}


def test_groups_that_nobody_renews_are_given_up_and_their_holder_ends(stage: StageName) -> None:
    import ray

    holder = _holder(stage)
    taken = ray.get(holder.take.remote("1.1", 0.5, ONE))
    assert len(taken.groups) == 1
    until(lambda: not is_there(stage), "its holder has ended")
    until(lambda: free("GPU") == 1, "the GPU is given back")
    assert not held(stage)
    # The name is free for whoever comes next.
    Places(stage, "1.2", LEASE).reserve(NEED, silent, timeout=60)


def test_groups_that_are_renewed_stay(stage: StageName) -> None:
    import ray

    Places(stage, "1.1", 4.0).reserve(NEED, silent, timeout=60)
    began = time.monotonic()
    holder = ray.get_actor(stage.holder, namespace=NAMESPACE)
    until(lambda: time.monotonic() - began > 10.0, "longer than the lease")
    assert list(held(stage).values()) == ["CREATED"]
    # By whom is known: an earlier attempt cannot renew them.
    assert ray.get(holder.renew.remote("1.0")).overtaken_by == "1.1"


def test_another_job_runs_in_the_groups_and_they_outlive_it(stage: StageName) -> None:
    import ray

    [group] = Places(stage, "1.1", LEASE).reserve(NEED, silent, timeout=60)["global_pool"]
    until(lambda: free("GPU") == 0, "the GPU is reserved")
    script = f"""
        import os, ray
        from ray.util.placement_group import PlacementGroup
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        ray.init(address={ray.get_runtime_context().gcs_address!r}, namespace="other", log_to_driver=False)
        group = PlacementGroup(ray.PlacementGroupID.from_hex({group!r}))
        assert group.bundle_count == 1, group.bundle_specs
        there = PlacementGroupSchedulingStrategy(placement_group=group, placement_group_bundle_index=0)

        @ray.remote(num_gpus=1 / 3, scheduling_strategy=there)
        class Worker:
            def group(self):
                return ray.util.get_current_placement_group().id.hex()

        print(ray.get(Worker.remote().group.remote(), timeout=120), flush=True)
        os._exit(9)
    """
    ended = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)], capture_output=True, text=True, check=False, timeout=300
    )
    assert ended.returncode == 9, ended.stderr
    assert ended.stdout.split() == [group]
    # Another one finds it as it was.
    assert held(stage) == {group: "CREATED"}
    assert free("GPU") == 0


def test_waiting_for_room_is_shown_and_ends(stage: StageName) -> None:
    seen: list[Any] = []
    large = Need(groups=(Group(gpus=2),))
    with (
        pytest.raises(
            VerlWorkflowError, match=r"has 8 of 8 CPUs and 1 of 1 GPUs free: bundle 2 of 2 lacks a GPU"
        ) as caught,
        kept_for_retries(stage, "1.1", lease=LEASE) as places,
    ):
        places.reserve(large, seen.append, timeout=4)
    assert (caught.value.code, caught.value.retryable) == (ErrorCode.CAPACITY, True)
    assert "bundle 2 of 2 lacks a GPU" in seen[-1]["phase"]
    # Others may have what there was.
    assert not held(stage)


def test_a_holder_that_is_lost_while_room_is_waited_for_is_made_anew(stage: StageName) -> None:
    import ray

    blocker = ray.util.placement_group([{"GPU": 1}], name="blocker")
    ray.get(blocker.ready(), timeout=60)
    lost: list[Any] = []

    def report(_: Any) -> None:
        if not lost:
            lost.append(ray.get_actor(stage.holder, namespace=NAMESPACE))
            ray.kill(lost[0])
            ray.util.remove_placement_group(blocker)

    [group] = Places(stage, "1.1", LEASE).reserve(NEED, report, timeout=120)["global_pool"]
    assert lost
    until(lambda: held(stage) == {group: "CREATED"}, "the lost holder's group is gone")


def test_cpus_for_what_verl_starts_beside_the_groups_are_waited_for(stage: StageName) -> None:
    with pytest.raises(VerlWorkflowError, match="6 for verl's actors without a GPU, of which 1 find no place"):
        Places(stage, "1.1", LEASE).reserve(Need(groups=(Group(gpus=1),), single=6), silent, timeout=4)


@pytest.mark.parametrize(
    ("error", "kept"),
    [
        (VerlWorkflowError(ErrorCode.TRAINING_FAILED, "a worker died", retryable=True), True),
        (VerlWorkflowError(ErrorCode.TRAINING_FAILED, "NaN"), False),
        (UserError(ErrorCode.OVERRIDE_INVALID, "no such key"), False),
        (VerlWorkflowError(ErrorCode.CAPACITY, "no room", retryable=True), False),
        (KeyboardInterrupt(), False),
    ],
)
def test_gpus_are_kept_only_where_another_attempt_follows(stage: StageName, error: BaseException, kept: bool) -> None:
    with pytest.raises(type(error)), kept_for_retries(stage, "1.1", lease=LEASE) as places:
        places.reserve(NEED, silent, timeout=60)
        raise error
    assert bool(held(stage)) is kept


def test_gpus_are_given_back_at_the_end(stage: StageName) -> None:
    with kept_for_retries(stage, "1.1", lease=LEASE) as places:
        places.reserve(NEED, silent, timeout=60)
    assert not held(stage)


def test_it_is_a_stages_turn_as_long_as_it_holds_gpus(stage: StageName) -> None:
    places = Places(stage, "1.1", LEASE)
    with training_lease(str(stage), silent, stage=stage):
        places.reserve(NEED, silent, timeout=60)
    places.leave()
    other = StageName(run_id="other", incarnation="0123456789abcdef", stage="train")
    with (
        pytest.raises(VerlWorkflowError, match=f"{stage}, which holds GPUs for its attempts"),
        training_lease(str(other), silent, timeout=0.1, stage=other),
    ):
        pass
    # Its own next attempt does not wait for it.
    with training_lease(str(stage), silent, timeout=60, stage=stage):
        pass
    places.release()
    with training_lease(str(other), silent, timeout=60, stage=other):
        pass


def test_an_accelerator_and_labels_are_asked_of_ray() -> None:
    asked = Bundles.of(Group(gpus=2, where=Where(accelerator="H200", labels={"zone": "a"})))
    assert asked.bundles == ({"CPU": 3, "GPU": 1, "accelerator_type:H200": 0.001},) * 2
    assert asked.selector == {"zone": "a"}
