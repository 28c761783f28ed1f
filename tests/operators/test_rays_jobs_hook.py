from __future__ import annotations

import re
import threading
import time

import pytest
from _ray_standin import Connect, Fault, RayStandin, StandinJob
from verl_airflow._jobs import JobRequest, JobStatus
from verl_airflow._log_cursor import LogCursor
from verl_airflow.hook import RayJobsHook

from verl_workflow.errors import ErrorCode, UserError, VerlWorkflowError

REQUEST = JobRequest(entrypoint="python train.py", runtime_env={"env_vars": {"A": "1"}}, num_cpus=1)


def test_a_job_is_submitted_as_it_was_asked_for(ray: RayStandin, connect: Connect) -> None:
    assert RayJobsHook(connect()).submit(REQUEST, "night-g1") is None
    body = ray.jobs["night-g1"].body
    assert body["entrypoint"] == "python train.py"
    assert body["runtime_env"] == {"env_vars": {"A": "1"}}
    assert body["entrypoint_num_cpus"] == 1
    assert "entrypoint_num_gpus" not in body


def test_the_same_submission_again_attaches_to_the_job(ray: RayStandin, connect: Connect) -> None:
    hook = RayJobsHook(connect())
    hook.submit(REQUEST, "night-g1")
    found = hook.submit(REQUEST, "night-g1")
    assert found is not None
    assert found.status is JobStatus.RUNNING
    assert ray.submissions == ["night-g1"]
    assert ray.requests.count("POST /api/jobs/") == 2, "a taken id is no error of the server to be tried again"


def test_an_id_of_another_command_is_a_conflict(ray: RayStandin, connect: Connect) -> None:
    hook = RayJobsHook(connect())
    hook.submit(REQUEST, "night-g1")
    with pytest.raises(VerlWorkflowError, match="night-g1") as caught:
        hook.submit(JobRequest(entrypoint="python other.py"), "night-g1")
    assert caught.value.code is ErrorCode.JOB_CONFLICT


def test_metadata_does_not_make_another_command_of_it(ray: RayStandin, connect: Connect) -> None:
    told = JobRequest(entrypoint="true", metadata={"owner": "me"})
    assert told.fingerprint == JobRequest(entrypoint="true").fingerprint
    assert told.fingerprint != JobRequest(entrypoint="true", num_gpus=1).fingerprint


@pytest.mark.parametrize("fault", [Fault(cut=True, late=True), Fault(hang_s=0.6, cut=True, late=True)])
def test_an_answer_that_is_lost_submits_nothing_twice(ray: RayStandin, connect: Connect, fault: Fault) -> None:
    ray.faults = [fault]
    found = RayJobsHook(connect(), timeout_s=0.3).submit(REQUEST, "night-g1", token="mine")
    assert found is not None
    assert found.metadata["verl_workflow_token"] == "mine"
    assert ray.submissions == ["night-g1"]


@pytest.mark.parametrize(
    "fault",
    [
        Fault(status=500, text="No available agent to submit job, please try again later."),
        Fault(status=502),
        Fault(status=503),
        Fault(status=429, headers={"Retry-After": "0"}),
        Fault(cut=True),
        Fault(hang_s=0.6, cut=True),
    ],
    ids=["500", "502", "503", "429", "cut", "silence"],
)
def test_what_may_pass_is_tried_again(ray: RayStandin, connect: Connect, fault: Fault) -> None:
    hook = RayJobsHook(connect(), timeout_s=0.3)
    hook.submit(REQUEST, "night-g1")
    ray.faults = [fault, fault]
    assert hook.job("night-g1").status is JobStatus.RUNNING
    assert not ray.faults


def test_silence_ends_with_an_error(ray: RayStandin, connect: Connect) -> None:
    ray.faults = [Fault(hang_s=1.0) for _ in range(2)]
    began = time.monotonic()
    with pytest.raises(VerlWorkflowError, match="does not answer: ReadTimeout") as caught:
        RayJobsHook(connect(), timeout_s=0.2, attempts=2).job("night-g1")
    assert time.monotonic() - began < 1.0
    assert caught.value.code is ErrorCode.CLUSTER_UNREACHABLE
    assert caught.value.retryable


def test_a_cluster_that_is_not_there_is_told(connect: Connect) -> None:
    with pytest.raises(VerlWorkflowError, match="does not answer: ConnectError") as caught:
        RayJobsHook(connect(host="http://127.0.0.1:9"), attempts=2).job("night-g1")
    assert caught.value.code is ErrorCode.CLUSTER_UNREACHABLE


@pytest.mark.parametrize("password", ["", "wrong"])
def test_refused_access_is_told_at_once(ray: RayStandin, connect: Connect, password: str) -> None:
    ray.token = "secret"
    with pytest.raises(UserError, match="Ray token") as caught:
        RayJobsHook(connect(password=password)).submit(REQUEST, "night-g1")
    assert caught.value.code is ErrorCode.ACCESS_DENIED
    assert len(ray.requests) == 1


def test_the_token_is_sent(ray: RayStandin, connect: Connect) -> None:
    ray.token = "secret"
    RayJobsHook(connect(password="secret")).submit(REQUEST, "night-g1")
    assert ray.submissions == ["night-g1"]


def test_a_request_that_ray_cannot_read_is_not_tried_again(ray: RayStandin, connect: Connect) -> None:
    text = "RuntimeError: Request failed with status code 400: TypeError: runtime_env must be a dict."
    ray.faults = [Fault(status=500, text=text)]
    with pytest.raises(VerlWorkflowError, match="must be a dict") as caught:
        RayJobsHook(connect()).submit(REQUEST, "night-g1")
    assert caught.value.code is ErrorCode.JOB_REFUSED
    assert len(ray.requests) == 1


def test_what_is_not_ray_is_told(ray: RayStandin, connect: Connect) -> None:
    ray.faults = [Fault(status=302, headers={"Location": "/login"}), Fault(status=200, text="<html>Hello</html>")]
    for _ in range(2):
        with pytest.raises(VerlWorkflowError, match="not Ray's Jobs API"):
            RayJobsHook(connect()).job("night-g1")


def test_an_unknown_job_is_told(connect: Connect) -> None:
    for act in (RayJobsHook(connect()).job, RayJobsHook(connect()).stop, RayJobsHook(connect()).delete):
        with pytest.raises(VerlWorkflowError) as caught:
            act("night-g1")
        assert caught.value.code is ErrorCode.JOB_UNKNOWN


def test_a_stop_returns_when_the_job_has_ended(ray: RayStandin, connect: Connect) -> None:
    hook = RayJobsHook(connect())
    hook.submit(REQUEST, "night-g1")
    assert hook.stop("night-g1").status is JobStatus.STOPPED
    assert ray.requests[-3:] == ["GET /api/jobs/night-g1"] * 3


def test_a_stop_that_ray_does_not_carry_out_is_an_error(ray: RayStandin, connect: Connect) -> None:
    hook = RayJobsHook(connect())
    hook.submit(REQUEST, "night-g1")
    ray.job.looks_to_stop = 1_000_000
    with pytest.raises(VerlWorkflowError, match=re.escape("still RUNNING after 0.1 s")):
        hook.stop("night-g1", timeout_s=0.1)


def test_a_job_that_has_ended_is_stopped_without_harm(ray: RayStandin, connect: Connect) -> None:
    hook = RayJobsHook(connect())
    hook.submit(REQUEST, "night-g1")
    ray.job.end("SUCCEEDED", exit_code=0)
    assert hook.stop("night-g1").status is JobStatus.SUCCEEDED


def test_only_a_job_that_has_ended_is_deleted(ray: RayStandin, connect: Connect) -> None:
    hook = RayJobsHook(connect())
    hook.submit(REQUEST, "night-g1")
    with pytest.raises(VerlWorkflowError, match="Stop it first"):
        hook.delete("night-g1")
    ray.job.end("FAILED", exit_code=1)
    hook.delete("night-g1")
    assert ray.jobs == {}


def test_a_log_is_followed_to_its_end_over_lost_connections(ray: RayStandin, connect: Connect) -> None:
    hook = RayJobsHook(connect())
    hook.submit(REQUEST, "night-g1")
    lines = [f"step {number} größe\u2028" for number in range(50)]

    def write() -> None:
        for line in lines:
            ray.job.logs += line[:3]
            time.sleep(0.002)
            ray.job.logs += f"{line[3:]}\n"
            if line.startswith(("step 10", "step 30")):
                ray.faults += [Fault(cut=True), Fault(status=500)]
        ray.job.logs += "no end"
        ray.job.end("SUCCEEDED", exit_code=0)

    writer = threading.Thread(target=write)
    writer.start()
    assert list(hook.follow_logs("night-g1", poll_s=0.005)) == [*lines, "no end"]
    writer.join()


def test_what_a_job_writes_between_two_looks_is_not_missed(ray: RayStandin, connect: Connect) -> None:
    hook = RayJobsHook(connect())
    hook.submit(REQUEST, "night-g1")
    ray.job.logs = "first\n"

    def end(job: StandinJob) -> None:
        job.logs = "first\nlast\n"
        job.end("SUCCEEDED")

    ray.on_read = end
    assert list(hook.follow_logs("night-g1", poll_s=0.01)) == ["first", "last"]


def test_a_log_goes_on_where_the_cursor_stands(ray: RayStandin, connect: Connect) -> None:
    hook = RayJobsHook(connect())
    hook.submit(REQUEST, "night-g1")
    ray.job.logs = "one\ntwo\nthree\n"
    cursor = LogCursor(len("one\n"))
    ray.job.end("SUCCEEDED")
    assert list(hook.follow_logs("night-g1", cursor)) == ["two", "three"]
    assert list(hook.follow_logs("night-g1", cursor)) == []


def test_the_button_of_the_form_tells_ray_s_version(ray: RayStandin, connect: Connect) -> None:
    assert RayJobsHook(connect()).test_connection() == (True, f"Ray 2.60.0 answers at {ray.url}")


def test_the_button_of_the_form_tells_what_is_wrong(ray: RayStandin, connect: Connect) -> None:
    ray.token = "secret"
    works, said = RayJobsHook(connect()).test_connection()
    assert not works
    assert "Put the token" in said
    works, said = RayJobsHook(connect(host="ray://head:10001")).test_connection()
    assert not works
    assert "http://ray-head:8265" in said


def test_an_id_is_one_part_of_the_path(ray: RayStandin, connect: Connect) -> None:
    RayJobsHook(connect()).submit(REQUEST, "a/b c")
    assert RayJobsHook(connect()).job("a/b c").status is JobStatus.RUNNING
