"""What dead attempts leave is removed, and nothing of anybody else's, on a real Ray."""

from __future__ import annotations

import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from verl_workflow.storage import Store
from verl_workflow.training._names import StageName
from verl_workflow.training._nodes import Group, Need
from verl_workflow.training._places import Places, _holder
from verl_workflow.training._reaper import end_process, reap, training_jobs
from verl_workflow.workflow import Driver, InlineLauncher, Plan, create_run, read_run

ON_RAY = pytest.mark.usefixtures("ray_cluster")
STAGE = StageName(run_id="night", incarnation="0123456789abcdef", stage="train")
OTHER = StageName(run_id="day", incarnation="0123456789abcdef", stage="train")

# As verl's driver: actors in a namespace of its own, and the transfer queue's controller.
DRIVER = """
    import sys, time, ray

    ray.init(address=sys.argv[1], namespace=sys.argv[2], log_to_driver=False)

    @ray.remote(num_cpus=0)
    class Actor:
        def ping(self):
            pass

    worker = Actor.options(name="reward_loop_worker_0").remote()
    queue = Actor.options(name=sys.argv[3], namespace="transfer_queue").remote()
    ray.get([worker.ping.remote(), queue.ping.remote()])
    print("up", flush=True)
    time.sleep(3600)
"""


@pytest.fixture
def driver() -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Starts a training of an attempt, which nobody supervises."""
    import ray

    started: list[subprocess.Popen[str]] = []

    def start(namespace: str, queue: str = "TransferQueueController") -> subprocess.Popen[str]:
        address = ray.get_runtime_context().gcs_address
        words = [sys.executable, "-c", textwrap.dedent(DRIVER), address, namespace, queue]
        started.append(subprocess.Popen(words, stdout=subprocess.PIPE, text=True))
        stream = started[-1].stdout
        assert stream is not None
        assert stream.readline() == "up\n"
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.wait()


def named() -> set[tuple[str, str]]:
    import ray

    return {(one["namespace"], one["name"]) for one in ray.util.list_named_actors(all_namespaces=True)}


def until(ready: Callable[[], Any], what: str) -> None:
    deadline = time.monotonic() + 120
    while not ready():
        assert time.monotonic() < deadline, what
        time.sleep(0.1)


@ON_RAY
def test_an_earlier_attempt_that_still_trains_is_ended_with_all_its_actors(
    driver: Callable[..., subprocess.Popen[str]], tmp_path: Path
) -> None:
    orphan = driver(STAGE.job("1.1"))
    assert ("transfer_queue", "TransferQueueController") in named()
    [job] = [job for job in training_jobs() if job.stage == STAGE and not job.dead]
    assert (job.owner, job.pid) == ("1.1", orphan.pid)
    [told] = reap(STAGE, "1.2", storage=str(tmp_path))
    assert told.startswith("attempt 1.1 still trained")
    assert orphan.wait(60) == -9
    until(lambda: not {name for name in named() if name[0] in ("transfer_queue", STAGE.job("1.1"))}, "they are gone")
    assert reap(STAGE, "1.2", storage=str(tmp_path)) == []


@ON_RAY
def test_what_is_another_stages_or_a_later_attempts_is_left_alone(
    driver: Callable[..., subprocess.Popen[str]], tmp_path: Path
) -> None:
    later, other, foreign = driver(STAGE.job("2.3"), "a"), driver(OTHER.job("1.1"), "b"), driver("somebody", "c")
    assert reap(STAGE, "2.2", storage=str(tmp_path)) == []
    assert [process.poll() for process in (later, other, foreign)] == [None, None, None]
    assert {("transfer_queue", name) for name in "abc"} <= named()


@ON_RAY
def test_named_actors_of_a_training_that_has_ended_are_ended_and_no_others(tmp_path: Path) -> None:
    import ray

    script = """
        import sys, ray

        ray.init(address=sys.argv[1], namespace=sys.argv[2], log_to_driver=False)

        @ray.remote(num_cpus=0)
        class Actor:
            def ping(self):
                pass

        # Of a job that has ended Ray leaves only these.
        for namespace in (sys.argv[2], "somebody"):
            actor = Actor.options(name="left", namespace=namespace, lifetime="detached").remote()
            ray.get(actor.ping.remote())
    """
    address = ray.get_runtime_context().gcs_address
    words = [sys.executable, "-c", textwrap.dedent(script), address, OTHER.job("1.1")]
    subprocess.run(words, check=True, timeout=300)
    until(lambda: all(job.dead for job in training_jobs() if job.stage == OTHER), "Ray has seen the job's end")
    assert reap(STAGE, "1.1", storage=str(tmp_path)) == [
        "the actor left was left by a training that has ended: it was ended"
    ]
    until(lambda: (OTHER.job("1.1"), "left") not in named(), "it has ended")
    assert ("somebody", "left") in named()
    ray.kill(ray.get_actor("left", namespace="somebody"))


@ON_RAY
def test_groups_that_nobody_holds_are_removed_and_no_others(tmp_path: Path) -> None:
    import ray
    from ray.util.placement_group import placement_group

    left = placement_group([{"CPU": 1}], name=f"{STAGE.groups}1.0", lifetime="detached")
    verls = placement_group([{"CPU": 1}], name="global_poolverl_group_1:0", lifetime="detached")
    places = Places(OTHER, "1.1", 60.0)
    [held] = places.reserve(Need(groups=(Group(gpus=1),)), lambda _: None, timeout=60)["global_pool"]
    assert [told for told in reap(STAGE, "1.1", storage=str(tmp_path)) if f"{STAGE.groups}1.0" in told]
    table = ray.util.placement_group_table()
    assert table.get(left.id.hex(), {}).get("state", "REMOVED") == "REMOVED"
    assert table[verls.id.hex()]["state"] == "CREATED"
    assert table[held]["state"] == "CREATED"
    ray.util.remove_placement_group(verls)
    places.release()


@ON_RAY
def test_gpus_of_a_run_that_is_over_are_given_back(tmp_path: Path) -> None:
    import ray

    store = Store(str(tmp_path))
    over = stage_of(store, "over", drive=True)
    going = stage_of(store, "going", drive=False)
    for one in (over, going, OTHER):
        ray.get(_holder(one).take.remote("1.1", 600.0, []))
    assert reap(STAGE, "1.1", storage=str(tmp_path)) == [
        "GPUs were still held for run over, stage train, which is over: they were given back"
    ]
    until(lambda: ("verl_workflow", over.holder) not in named(), "the holder has ended")
    for one in (going, OTHER):
        assert ("verl_workflow", one.holder) in named()
        Places(one, "1.1", 60.0).release()


def stage_of(store: Store, run_id: str, *, drive: bool) -> StageName:
    """A stage of a recorded run; driven, it succeeds."""
    create_run(store, run_id, {})
    if drive:
        Driver(store=store, run_id=run_id, plan=Plan(steps=()), launcher=InlineLauncher()).run()
    return StageName(run_id=run_id, incarnation=read_run(store, run_id).incarnation, stage="train")


def test_a_process_is_ended_only_if_it_is_the_one_that_is_meant() -> None:
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(3600)"]) as process:
        born = psutil.Process(process.pid).create_time()
        # Younger than the job: the id has been given to somebody else since.
        assert end_process(process.pid, born - 60)
        assert process.poll() is None
        assert end_process(process.pid, born)
        assert process.wait(10) == -9
    assert end_process(process.pid, born)
