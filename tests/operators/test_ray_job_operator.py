"""One Ray job as a task, over tries, clears and losses; the triggers are rebuilt as Airflow rebuilds them."""

from __future__ import annotations

import asyncio
import time
from datetime import timedelta
from typing import Any

import pytest
from _ray_standin import Connect, Fault, RayStandin
from _task_context import Task, Ti, rebuilt
from airflow.sdk.exceptions import AirflowException, AirflowFailException, TaskDeferred
from verl_airflow import _job_operator
from verl_airflow.operators import RayJobOperator

from verl_workflow.errors import UserError


def task(connect: Connect, **options: Any) -> Task:
    conn_id = connect()
    wanted = {"entrypoint": "python train.py", "poll_interval": 0.02, **options}
    return Task(lambda: RayJobOperator(task_id="train", conn_id=conn_id, **wanted))


def ends(ray: RayStandin, status: str, **facts: Any) -> None:
    """Each job ends so at once."""
    ray.on_submit = lambda job: job.end(status, **facts)


@pytest.mark.parametrize("deferrable", [True, False])
def test_it_succeeds_with_its_job(ray: RayStandin, connect: Connect, deferrable: bool) -> None:
    ends(ray, "SUCCEEDED", exit_code=0)
    assert task(connect, deferrable=deferrable).run() == {"job_id": ray.submissions[0]}
    assert len(ray.submissions) == 1


@pytest.mark.parametrize("deferrable", [True, False])
def test_a_failed_job_fails_the_try_and_the_next_submits_anew(
    ray: RayStandin, connect: Connect, deferrable: bool
) -> None:
    ends(ray, "FAILED", exit_code=1, message="exit code 1, last available logs: KeyError: 'x'")
    work = task(connect, deferrable=deferrable)
    with pytest.raises(AirflowException, match="KeyError") as caught:
        work.run()
    assert not isinstance(caught.value, AirflowFailException)
    ends(ray, "SUCCEEDED", exit_code=0)
    work.next_try().run()
    assert [job_id[-3:] for job_id in ray.submissions] == ["-g1", "-g2"]


def test_an_exit_code_can_be_final(ray: RayStandin, connect: Connect) -> None:
    ends(ray, "FAILED", exit_code=2)
    with pytest.raises(AirflowFailException):
        task(connect, final_exit_codes=[2]).run()


def test_the_id_comes_from_names_and_the_generation_only(ray: RayStandin, connect: Connect) -> None:
    ends(ray, "SUCCEEDED")
    for _ in range(2):
        ray.lose_head()
        task(connect).run()
    assert ray.submissions[0] == ray.submissions[1]
    mapped = task(connect)
    mapped.ti = Ti(map_index=3)
    mapped.run()
    assert ray.submissions[2] != ray.submissions[0]


def test_a_try_that_died_while_it_waited_leaves_its_job_to_the_next(ray: RayStandin, connect: Connect) -> None:
    work = task(connect)
    work.start()
    deferred = work.next_try().start()
    ray.job.end("SUCCEEDED")
    work.finish(deferred)
    assert len(ray.submissions) == 1


def test_the_id_is_on_record_before_it_is_submitted(ray: RayStandin, connect: Connect) -> None:
    work = task(connect)
    seen: list[Any] = []
    ray.on_submit = lambda job: seen.append(work.states.get(RayJobOperator.external_id_key))
    work.start()
    assert seen == ray.submissions


def test_a_try_that_died_before_it_submitted_uses_the_next_id(ray: RayStandin, connect: Connect) -> None:
    work = task(connect)
    ray.faults = [Fault(status=503, method="POST") for _ in range(5)]
    with pytest.raises(Exception, match="503"):
        work.run()
    ends(ray, "SUCCEEDED")
    work.next_try().run()
    assert [job_id[-3:] for job_id in ray.submissions] == ["-g2"]


def test_a_task_that_is_cleared_after_its_success_runs_again(ray: RayStandin, connect: Connect) -> None:
    ends(ray, "SUCCEEDED")
    work = task(connect)
    work.run()
    work.next_try().run()
    assert [job_id[-3:] for job_id in ray.submissions] == ["-g1", "-g2"]


def test_a_success_that_no_try_has_seen_is_not_repeated(ray: RayStandin, connect: Connect) -> None:
    work = task(connect)
    work.start()
    ray.job.end("SUCCEEDED")
    assert work.next_try().run() == {"job_id": ray.submissions[0]}
    assert len(ray.submissions) == 1


def test_a_clear_that_stops_the_job_the_new_try_has_found_submits_anew(ray: RayStandin, connect: Connect) -> None:
    work = task(connect)
    old = work.start()
    new = work.next_try().start()
    asyncio.run(rebuilt(old.trigger).on_kill())
    assert ray.job.status == "STOPPED"
    ends(ray, "SUCCEEDED")
    work.finish(new)
    assert [job_id[-3:] for job_id in ray.submissions] == ["-g1", "-g2"]


def test_a_stop_long_after_a_clear_is_somebody_s_will(
    ray: RayStandin, connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    work = task(connect)
    work.start()
    new = work.next_try().start()
    ray.job.end("STOPPED")
    monkeypatch.setattr(_job_operator, "_KILLED_WITHIN_S", -1.0)
    with pytest.raises(AirflowFailException, match="stopped in Ray"):
        work.finish(new)
    assert len(ray.submissions) == 1


def test_a_job_that_somebody_stops_in_ray_is_not_run_again(ray: RayStandin, connect: Connect) -> None:
    ends(ray, "STOPPED")
    with pytest.raises(AirflowFailException, match="stopped in Ray"):
        task(connect).run()


def test_a_cluster_that_has_forgotten_the_job_costs_a_try(ray: RayStandin, connect: Connect) -> None:
    work = task(connect)
    deferred = work.start()
    ray.lose_head()
    with pytest.raises(AirflowException, match="lost"):
        work.finish(deferred)
    ends(ray, "SUCCEEDED")
    work.next_try().run()
    assert [job_id[-3:] for job_id in ray.submissions] == ["-g1", "-g2"]


def test_a_dag_run_of_a_name_that_was_used_takes_the_next_free_id(ray: RayStandin, connect: Connect) -> None:
    ends(ray, "SUCCEEDED")
    task(connect).run()
    again = task(connect)
    again.run()
    assert [job_id[-3:] for job_id in ray.submissions] == ["-g1", "-g2"], "the old job's success is not this one's"


def test_a_job_of_a_deleted_dag_run_that_still_runs_is_joined(ray: RayStandin, connect: Connect) -> None:
    task(connect).start()
    again = task(connect)
    deferred = again.start()
    ray.job.end("SUCCEEDED")
    again.finish(deferred)
    assert len(ray.submissions) == 1


def test_another_command_under_the_id_ends_the_task(ray: RayStandin, connect: Connect) -> None:
    task(connect).start()
    with pytest.raises(AirflowFailException, match="another job has this submission id"):
        task(connect, entrypoint="python other.py").run()


@pytest.mark.parametrize("deferrable", [True, False])
@pytest.mark.parametrize("limit", [{"deadline": 0.2}, {"execution_timeout": timedelta(seconds=0.2)}])
def test_a_job_is_stopped_at_its_deadline(
    ray: RayStandin, connect: Connect, deferrable: bool, limit: dict[str, Any]
) -> None:
    with pytest.raises(AirflowException, match="deadline"):
        task(connect, deferrable=deferrable, **limit).run()
    assert ray.job.status == "STOPPED"


def test_a_cancelled_wait_stops_nothing(ray: RayStandin, connect: Connect) -> None:
    deferred = task(connect).start()

    async def restart() -> None:
        trigger = rebuilt(deferred.trigger)
        waiting = asyncio.ensure_future(anext(trigger.run()))
        await asyncio.sleep(0.1)
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        await trigger.cleanup()

    asyncio.run(restart())
    assert ray.job.status == "RUNNING"
    assert not [request for request in ray.requests if "/stop" in request]


def test_a_user_s_kill_of_a_deferred_task_stops_the_job(ray: RayStandin, connect: Connect) -> None:
    deferred = task(connect).start()
    asyncio.run(rebuilt(deferred.trigger).on_kill())
    assert ray.job.status == "STOPPED"


def test_a_user_s_kill_of_a_task_in_a_worker_stops_the_job(ray: RayStandin, connect: Connect) -> None:
    work = task(connect)
    operator = work.make()
    with pytest.raises(TaskDeferred):
        operator.execute(work.context())
    operator.on_kill()
    assert ray.job.status == "STOPPED"


def test_a_kill_of_a_job_that_is_gone_is_no_error(ray: RayStandin, connect: Connect) -> None:
    deferred = task(connect).start()
    ray.lose_head()
    asyncio.run(rebuilt(deferred.trigger).on_kill())


@pytest.mark.parametrize("deferrable", [True, False])
def test_silence_of_the_cluster_is_waited_out(ray: RayStandin, connect: Connect, deferrable: bool) -> None:
    def submitted(job: Any) -> None:
        ray.faults = [Fault(cut=True, method="GET"), Fault(status=500, method="GET"), Fault(status=502, method="GET")]
        job.end("SUCCEEDED")

    ray.on_submit = submitted
    task(connect, deferrable=deferrable).run()
    assert not ray.faults


def test_a_cluster_that_stays_silent_fails_the_try_and_not_the_job(ray: RayStandin, connect: Connect) -> None:
    work = task(connect, unreachable_s=0.1)
    deferred = work.start()
    ray.faults = [Fault(cut=True) for _ in range(500)]
    with pytest.raises(AirflowException, match="unreachable"):
        work.finish(deferred)
    ray.faults = []
    assert ray.job.status == "RUNNING"
    deferred = work.next_try().start()
    ray.job.end("SUCCEEDED")
    work.finish(deferred)
    assert len(ray.submissions) == 1


def test_a_token_that_is_not_accepted_any_more_can_be_mended_by_a_retry(ray: RayStandin, connect: Connect) -> None:
    work = task(connect)
    deferred = work.start()
    ray.token = "changed"
    with pytest.raises(AirflowException, match="Put the token") as caught:
        work.finish(deferred)
    assert not isinstance(caught.value, AirflowFailException)
    assert ray.job.status == "RUNNING"


def test_a_token_that_is_not_accepted_when_a_retry_looks_for_its_job_is_not_final(
    ray: RayStandin, connect: Connect
) -> None:
    work = task(connect)
    work.start()
    ray.token = "changed"
    with pytest.raises(UserError, match="Put the token"):
        work.next_try().run()


def test_a_request_that_ray_refuses_ends_the_task(ray: RayStandin, connect: Connect) -> None:
    ray.faults = [Fault(status=400, text="TypeError: runtime_env", method="POST")]
    with pytest.raises(AirflowFailException, match="runtime_env"):
        task(connect).run()


@pytest.mark.parametrize("deferrable", [True, False])
def test_the_log_is_told_once(
    ray: RayStandin, connect: Connect, deferrable: bool, caplog: pytest.LogCaptureFixture, capsys: Any
) -> None:
    def submitted(job: Any) -> None:
        job.logs = "step 1\nst"

    def read(job: Any) -> None:
        job.logs = "step 1\nstep 2\n"
        job.end("SUCCEEDED")

    ray.on_submit, ray.on_read = submitted, read
    with caplog.at_level("INFO"):
        task(connect, deferrable=deferrable).run()
    told = caplog.text + "".join(capsys.readouterr())
    assert told.count("step 1") == told.count("step 2") == 1


def test_a_trigger_keeps_its_arguments_over_the_database(ray: RayStandin, connect: Connect) -> None:
    trigger = task(connect, deadline=60).start().trigger
    assert rebuilt(trigger).serialize() == trigger.serialize()
    assert trigger.deadline == pytest.approx(time.time() + 60, abs=5)


def test_no_secret_is_in_the_trigger(ray: RayStandin, connect: Connect) -> None:
    ray.token = "secret-token"
    conn_id = connect(password="secret-token")
    work = Task(lambda: RayJobOperator(task_id="train", conn_id=conn_id, entrypoint="true"))
    assert "secret-token" not in repr(work.start().trigger.serialize())
    assert "secret-token" not in repr(RayJobOperator(task_id="t", conn_id=conn_id, entrypoint="true").hook.address)


def test_the_link_leads_to_the_job_in_ray_s_dashboard(ray: RayStandin, connect: Connect) -> None:
    work = task(connect)
    work.start()
    assert work.ti.pushed["ray_dashboard_url"] == f"{ray.url}/#/jobs/{ray.submissions[0]}"
