"""A pipeline as one task: the journal, written by the workflow package itself, says what became of the run."""

from __future__ import annotations

import asyncio
import shlex
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
from _journals import GOOD, claim, create, drive, failing, finish
from _ray_standin import Connect, Fault, RayStandin, StandinJob
from _task_context import Task, rebuilt
from airflow.sdk.exceptions import AirflowException, AirflowFailException, TaskDeferred
from verl_airflow.operators import VerlPipelineOperator

from verl_workflow.errors import ErrorCode, UserError, VerlWorkflowError
from verl_workflow.storage import Store
from verl_workflow.workflow import RunStatus, StepContext, read_run, request_cancel
from verl_workflow.workflow._heartbeat import LEASE_S


def task(connect: Connect, storage: str, **options: Any) -> Task:
    conn_id = connect(storage=storage)
    wanted = {"pipeline": "/p/nightly.yaml", "run_id": "night", "poll_interval": 0.02, **options}
    return Task(lambda: VerlPipelineOperator(task_id="train", conn_id=conn_id, **wanted))


def words(ray: RayStandin, index: int = -1) -> list[str]:
    """The command of a job."""
    return shlex.split(list(ray.jobs.values())[index].entrypoint)


def run_id_of(job: StandinJob) -> str:
    return job.metadata["verl_workflow_run"]


def cluster(ray: RayStandin, storage: str, *stages: Any) -> None:
    """What each job in turn does, at once: it starts or resumes the run with these stages."""
    coming = iter(stages)

    def submitted(job: StandinJob) -> None:
        doing = next(coming)
        if callable(doing):
            doing(job)
            return
        if shlex.split(job.entrypoint)[1] == "run":
            create(storage, run_id_of(job), doing)
        drive(storage, run_id_of(job), doing)
        status = read_run(Store(storage), run_id_of(job)).status
        code = {RunStatus.SUCCEEDED: 0, RunStatus.FAILED: 1, RunStatus.CANCELLED: 3}[status]
        job.end("FAILED" if code else "SUCCEEDED", exit_code=code, message=f"exit code {code}")

    ray.on_submit = submitted


@pytest.fixture
def gone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Drivers that do not write count as gone after a tenth of a second."""
    from verl_workflow.workflow import _state

    monkeypatch.setattr(_state, "LEASE_S", 0.1)


@pytest.mark.parametrize("deferrable", [True, False])
def test_it_runs_the_pipeline_and_returns_its_numbers(
    ray: RayStandin, connect: Connect, storage: str, deferrable: bool
) -> None:
    cluster(ray, storage, GOOD)
    work = task(connect, storage, pipeline_params={"steps": 40, "name": "a b"}, deferrable=deferrable)
    result = work.run()
    assert isinstance(result.pop("seconds"), float)
    assert result == {
        "run_id": "night",
        "storage": storage,
        "status": "succeeded",
        "scores": {"evaluate": {"score": 0.9, "acc": 0.85}},
        "rewards": {"train": 0.93},
        "promoted": True,
        "version": "v0001",
        "model": "/m/v0001",
    }
    asked = ["verl-workflow", "run", "/p/nightly.yaml", "--run-id", "night", "-p", "steps=40", "-p", "name=a b"]
    assert words(ray) == [*asked[:8], "name=a b", "--storage", storage]


def test_a_run_that_failed_by_its_cluster_is_resumed_by_the_retry(
    ray: RayStandin, connect: Connect, storage: str
) -> None:
    lost = VerlWorkflowError(ErrorCode.WORKER_LOST, "the node was lost", where="train")
    cluster(ray, storage, failing(lost), {"train": GOOD["train"]})
    work = task(connect, storage)
    with pytest.raises(AirflowException, match=r"infrastructure.*the node was lost.*verl-workflow explain") as caught:
        work.run()
    assert not isinstance(caught.value, AirflowFailException)
    assert work.next_try().run()["rewards"] == {"train": 0.93}
    assert words(ray)[:3] == ["verl-workflow", "resume", "night"]
    assert [job_id[-3:] for job_id in ray.submissions] == ["-g1", "-g2"]


@pytest.mark.parametrize(
    "error",
    [
        UserError(ErrorCode.OVERRIDE_INVALID, "there is no actor.lrr"),
        UserError(ErrorCode.DATA_INVALID, "no rows"),
        UserError(ErrorCode.REWARD_INVALID, "KeyError"),
        VerlWorkflowError(ErrorCode.TRAINING_FAILED, "the training failed (configuration): ValueError"),
        VerlWorkflowError(ErrorCode.TRAINING_FAILED, "the training failed (numeric): nan"),
        VerlWorkflowError(ErrorCode.REGISTRY_CONFLICT, "the alias was moved"),
    ],
    ids=lambda error: f"{error.code.value}",
)
def test_what_somebody_has_to_mend_is_not_retried(
    ray: RayStandin, connect: Connect, storage: str, error: VerlWorkflowError
) -> None:
    cluster(ray, storage, failing(error))
    with pytest.raises(AirflowFailException, match=error.what.split("(")[0]):
        task(connect, storage).run()


def test_a_task_that_is_cleared_after_a_mistake_was_mended_starts_a_new_run(
    ray: RayStandin, connect: Connect, storage: str
) -> None:
    cluster(ray, storage, failing(UserError(ErrorCode.DATA_INVALID, "no rows")), GOOD)
    work = task(connect, storage)
    with pytest.raises(AirflowFailException, match="no rows"):
        work.run()
    assert work.next_try().run()["run_id"] == "night.2"
    assert words(ray)[1] == "run", "a resumption would use the definition with the mistake"


def test_a_mistake_in_the_input_is_final_and_told_with_the_log(ray: RayStandin, connect: Connect, storage: str) -> None:
    ray.on_submit = lambda job: job.end("FAILED", exit_code=2, message="error: nightly.yaml:3: unknown key")
    with pytest.raises(AirflowFailException, match=r"nightly\.yaml:3: unknown key"):
        task(connect, storage).run()


def test_a_job_that_died_before_the_run_was_recorded_is_started_again(
    ray: RayStandin, connect: Connect, storage: str
) -> None:
    cluster(ray, storage, lambda job: job.end("FAILED", message="the supervisor died"), GOOD)
    work = task(connect, storage)
    with pytest.raises(AirflowException, match="the supervisor died"):
        work.run()
    work.next_try().run()
    assert words(ray)[1] == "run"


def test_a_run_that_the_command_line_has_finished_in_between_is_not_started_again(
    ray: RayStandin, connect: Connect, storage: str
) -> None:
    lost = VerlWorkflowError(ErrorCode.WORKER_LOST, "the node was lost")
    cluster(ray, storage, failing(lost))
    work = task(connect, storage)
    with pytest.raises(AirflowException):
        work.run()
    drive(storage, "night", {"train": GOOD["train"]})
    assert work.next_try().run()["status"] == "succeeded"
    assert len(ray.submissions) == 1


def test_a_driver_that_outlives_its_job_is_waited_for(ray: RayStandin, connect: Connect, storage: str) -> None:
    go = threading.Event()
    drivers: list[threading.Thread] = []

    def start(job: StandinJob) -> None:
        create(storage, "night", {"train": held})
        drivers.append(threading.Thread(target=drive, args=(storage, "night", {"train": held})))
        drivers[0].start()
        wait_until(lambda: read_run(Store(storage), "night").status is RunStatus.RUNNING)
        job.end("FAILED", message="the supervisor died")

    def held(ctx: StepContext) -> Any:
        go.wait(20)
        return GOOD["train"](ctx)

    cluster(ray, storage, start)
    work = task(connect, storage)
    deferred = work.start()
    threading.Timer(0.3, go.set).start()
    assert work.finish(deferred)["rewards"] == {"train": 0.93}
    assert len(ray.submissions) == 1
    drivers[0].join()


def test_a_run_whose_driver_is_lost_with_the_head_is_resumed_by_the_retry(
    ray: RayStandin, connect: Connect, storage: str, gone: None
) -> None:
    cluster(ray, storage, lambda job: create(storage, "night"), GOOD)
    work = task(connect, storage)
    deferred = work.start()
    ray.lose_head()
    time.sleep(0.2)
    with pytest.raises(AirflowException, match="lost"):
        work.finish(deferred)
    work.next_try().run()
    assert words(ray)[1] == "resume"


def test_a_run_that_somebody_else_drives_is_waited_for_and_taken_up_when_it_is_left(
    ray: RayStandin, connect: Connect, storage: str, gone: None
) -> None:
    create(storage, "night")
    cluster(ray, storage, GOOD)
    work = task(connect, storage)
    assert work.run()["status"] == "succeeded"
    assert words(ray)[1] == "resume"
    assert len(ray.submissions) == 1


def test_a_task_submits_one_job_a_try_however_often_drivers_die(
    ray: RayStandin, connect: Connect, storage: str, gone: None
) -> None:
    create(storage, "night")
    ray.on_submit = lambda job: job.end("FAILED", exit_code=1, message="killed")
    with pytest.raises(AirflowException, match="has not ended"):
        task(connect, storage).run()
    assert len(ray.submissions) == 1


def test_a_driver_that_dies_after_its_job_costs_a_try(
    ray: RayStandin, connect: Connect, storage: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Long enough for the task to see that it is driven yet.
    monkeypatch.setattr("verl_workflow.workflow._state.LEASE_S", 2.0)

    def die(job: StandinJob) -> None:
        create(storage, "night")
        job.end("FAILED", exit_code=1, message="killed")

    cluster(ray, storage, die, GOOD)
    work = task(connect, storage)
    with pytest.raises(AirflowException, match="has not ended"):
        work.run()
    assert len(ray.submissions) == 1
    work.next_try().run()
    assert words(ray)[1] == "resume"


def test_a_success_whose_records_were_half_written_is_not_repeated(
    ray: RayStandin, connect: Connect, storage: str
) -> None:
    cluster(ray, storage, GOOD)
    work = task(connect, storage)
    work.run()
    work.states.set(VerlPipelineOperator.external_id_key, ray.submissions[0])
    assert work.next_try().run()["run_id"] == "night"
    assert len(ray.submissions) == 1


def test_a_success_that_no_try_has_seen_is_not_repeated(ray: RayStandin, connect: Connect, storage: str) -> None:
    cluster(ray, storage, GOOD)
    work = task(connect, storage)
    work.start()
    ray.lose_head()
    assert work.next_try().run()["run_id"] == "night"
    assert len(ray.submissions) == 1


def test_a_task_that_is_cleared_after_its_success_starts_a_new_run(
    ray: RayStandin, connect: Connect, storage: str
) -> None:
    cluster(ray, storage, GOOD, GOOD)
    work = task(connect, storage)
    work.run()
    assert work.next_try().run()["run_id"] == "night.2"
    assert words(ray)[1:5] == ["run", "/p/nightly.yaml", "--run-id", "night.2"]


def test_a_run_that_is_there_already_is_taken_as_it_is(ray: RayStandin, connect: Connect, storage: str) -> None:
    finish(storage, "night")
    assert task(connect, storage).run()["run_id"] == "night"
    assert ray.submissions == []


def test_a_user_s_kill_cancels_the_run_and_stops_the_job(ray: RayStandin, connect: Connect, storage: str) -> None:
    cluster(ray, storage, lambda job: create(storage, "night"))
    deferred = task(connect, storage).start()
    asyncio.run(rebuilt(deferred.trigger).on_kill())
    assert ray.job.status == "STOPPED"
    state = read_run(Store(storage), "night")
    assert state.status is RunStatus.CANCELLED or state.cancel_requested


def test_a_run_that_is_recorded_while_its_job_is_stopped_is_cancelled_too(
    ray: RayStandin, connect: Connect, storage: str, gone: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    deferred = task(connect, storage).start()
    moves = ray._move_on

    def record_first(job: StandinJob) -> None:
        moves(job)
        if job.status == "STOPPED":
            create(storage, "night")
            time.sleep(0.2)

    monkeypatch.setattr(ray, "_move_on", record_first)
    asyncio.run(rebuilt(deferred.trigger).on_kill())
    assert read_run(Store(storage), "night").status is RunStatus.CANCELLED


def test_a_job_is_stopped_even_if_its_run_cannot_be_cancelled(
    ray: RayStandin, connect: Connect, storage: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    deferred = task(connect, storage).start()

    def unreachable(storage: str, run_id: str) -> None:
        raise VerlWorkflowError(ErrorCode.STORAGE, "the storage is away")

    monkeypatch.setattr("verl_airflow.triggers.cancel_run", unreachable)
    with pytest.raises(VerlWorkflowError, match="away"):
        asyncio.run(rebuilt(deferred.trigger).on_kill())
    assert ray.job.status == "STOPPED"


def test_a_user_s_kill_while_a_worker_has_the_task_cancels_the_run_too(
    ray: RayStandin, connect: Connect, storage: str, gone: None
) -> None:
    cluster(ray, storage, lambda job: create(storage, "night"))
    work = task(connect, storage)
    operator = work.make()
    with pytest.raises(TaskDeferred):
        operator.execute(work.context())
    time.sleep(0.2)
    operator.on_kill()
    assert ray.job.status == "STOPPED"
    assert read_run(Store(storage), "night").status is RunStatus.CANCELLED


def test_a_cancelled_wait_stops_and_cancels_nothing(ray: RayStandin, connect: Connect, storage: str) -> None:
    cluster(ray, storage, lambda job: create(storage, "night"))
    deferred = task(connect, storage).start()
    asyncio.run(rebuilt(deferred.trigger).cleanup())
    assert ray.job.status == "RUNNING"
    assert not read_run(Store(storage), "night").cancel_requested


def test_a_clear_while_it_is_deferred_starts_a_new_run(
    ray: RayStandin, connect: Connect, storage: str, gone: None
) -> None:
    cluster(ray, storage, lambda job: create(storage, "night"), GOOD)
    work = task(connect, storage)
    old = work.start()
    new = work.next_try().start()
    time.sleep(0.2)
    asyncio.run(rebuilt(old.trigger).on_kill())
    assert read_run(Store(storage), "night").status is RunStatus.CANCELLED
    assert work.finish(new)["run_id"] == "night.2"
    assert [job_id[-3:] for job_id in ray.submissions] == ["-g1", "-g2"]


def test_a_cleared_run_that_takes_long_to_stop_is_followed_by_a_new_one(
    ray: RayStandin, connect: Connect, storage: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster(ray, storage, lambda job: claim(storage, "night"), GOOD)
    work = task(connect, storage)
    old = work.start()
    new = work.next_try().start()
    asyncio.run(rebuilt(old.trigger).on_kill())
    waiting = work.resume(new)
    assert waiting.trigger.run_id == "night"
    # Later than a clear is remembered, the driver is done with its steps.
    monkeypatch.setattr("verl_airflow._job_operator._KILLED_WITHIN_S", -1.0)
    monkeypatch.setattr("verl_workflow.workflow._state.LEASE_S", 0.0)
    request_cancel(Store(storage), "night")
    assert work.finish(waiting)["run_id"] == "night.2"


def test_a_run_that_somebody_cancels_ends_the_task(ray: RayStandin, connect: Connect, storage: str, gone: None) -> None:
    def cancelled(job: StandinJob) -> None:
        create(storage, "night")
        time.sleep(0.2)
        request_cancel(Store(storage), "night")
        job.end("FAILED", exit_code=3)

    cluster(ray, storage, cancelled)
    with pytest.raises(AirflowFailException, match="was cancelled"):
        task(connect, storage).run()


def test_at_the_deadline_the_run_is_cancelled_and_the_job_stopped(
    ray: RayStandin, connect: Connect, storage: str, gone: None
) -> None:
    cluster(ray, storage, lambda job: create(storage, "night"))
    with pytest.raises(AirflowException, match="deadline"):
        task(connect, storage, deadline=0.3).run()
    assert ray.job.status == "STOPPED"
    assert read_run(Store(storage), "night").status is RunStatus.CANCELLED


def test_the_run_s_end_counts_even_if_the_cluster_cannot_be_reached_any_more(
    ray: RayStandin, connect: Connect, storage: str
) -> None:
    cluster(ray, storage, GOOD)
    work = task(connect, storage, unreachable_s=0.05)
    deferred = work.start()
    ray.faults = [Fault(cut=True) for _ in range(500)]
    assert work.finish(deferred)["status"] == "succeeded"


def test_without_a_storage_the_task_ends_with_what_to_do(ray: RayStandin, connect: Connect) -> None:
    with pytest.raises(AirflowFailException, match="Put its URI into the connection ray"):
        task(connect, "").run()


def test_run_ids_are_made_from_the_names_and_can_be_told_apart(ray: RayStandin, connect: Connect, storage: str) -> None:
    cluster(ray, storage, GOOD)
    work = task(connect, storage, run_id=None)
    run_id = work.run()["run_id"]
    assert run_id.startswith("nightly-scheduled__2026-12-01T02-00-00-00-00-train-")
    assert Store(storage).folders("runs") == [run_id]


def wait_until(holds: Callable[[], bool], timeout_s: float = LEASE_S) -> None:
    deadline = time.monotonic() + timeout_s
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.02)
