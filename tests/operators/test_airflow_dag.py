"""A DAG in Airflow's own machinery: task state store, deferral, serialised triggers and XCom are Airflow's."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
from _journals import GOOD, drive, failing, finish
from _ray_standin import RayStandin, StandinJob

from verl_workflow.errors import ErrorCode, VerlWorkflowError

DAG = """
    from datetime import timedelta
    from airflow.sdk import DAG, task
    from verl_airflow.operators import RayJobOperator, VerlPipelineOperator

    with DAG("nightly", schedule=None) as dag:
        hello = RayJobOperator(task_id="hello", conn_id="ray", entrypoint="echo {{ run_id }}", poll_interval=0.1)
        train = VerlPipelineOperator(
            task_id="train",
            conn_id="ray",
            pipeline="/p/nightly.yaml",
            poll_interval=0.1,
            retries=1,
            retry_delay=timedelta(0),
        )
        again = RayJobOperator.partial(task_id="again", conn_id="ray", deferrable=False, poll_interval=0.1).expand(
            entrypoint=["one", "two"]
        )

        @task.ray_job(conn_id="ray", poll_interval=0.1)
        def last(word, params=None, run_id=None):
            return f"last {word} {run_id}"

        hello >> train >> again >> last("word")
"""
RUN = """
    import json, sys
    from airflow.dag_processing.dagbag import DagBag
    bag = DagBag(sys.argv[1])
    assert not bag.import_errors, bag.import_errors
    run = bag.dags["nightly"].test()
    from airflow.models.xcom import XComModel
    from airflow.utils.session import create_session
    with create_session() as session:
        found = {f"{x.task_id}/{x.map_index}/{x.key}": x.value for x in session.query(XComModel)}
    print("RESULT", json.dumps({"state": str(run.state), "xcoms": found}))
"""


@pytest.fixture
def airflow_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("AIRFLOW_HOME", str(tmp_path / "airflow"))
    command = [sys.executable, "-m", "airflow", "db", "migrate"]
    subprocess.run(command, check=True, capture_output=True, env=os.environ, timeout=300)
    return tmp_path


def dag_test(folder: Path) -> dict[str, Any]:
    dags = folder / "airflow/dags"
    dags.mkdir()
    (dags / "nightly.py").write_text(textwrap.dedent(DAG))
    command = [sys.executable, "-c", textwrap.dedent(RUN), str(dags)]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ, timeout=300)
    results = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    assert results, done.stdout[-3000:] + done.stderr[-3000:]
    found: dict[str, Any] = json.loads(results[0].removeprefix("RESULT "))
    return found


@pytest.mark.airflow
def test_a_dag_of_jobs_and_of_a_pipeline_that_is_retried_runs_to_its_end(
    airflow_home: Path, ray: RayStandin, connect: Any, storage: str
) -> None:
    connect(storage=storage)

    def submitted(job: StandinJob) -> None:
        run_id = job.metadata.get("verl_workflow_run")
        if run_id and "resume" not in job.entrypoint:
            lost = failing(VerlWorkflowError(ErrorCode.WORKER_LOST, "the node was lost"))
            finish(storage, run_id, {**GOOD, **lost})
            job.end("FAILED", exit_code=1)
            return
        if run_id:
            drive(storage, run_id)
        job.end("SUCCEEDED", exit_code=0)

    ray.on_submit = submitted
    found = dag_test(airflow_home)
    assert found["state"] == "success"
    commands = [" ".join(job.entrypoint.split()[:2]) for job in ray.jobs.values()]
    assert commands[1:] == ["verl-workflow run", "verl-workflow resume", "one", "two", "last word"]
    assert commands[0].startswith("echo manual__")
    result = found["xcoms"]["train/-1/return_value"]
    assert result["version"] == "v0001"
    assert result["scores"] == {"evaluate": {"score": 0.9, "acc": 0.85}}
    assert ray.submissions[0] in found["xcoms"]["hello/-1/_link_RayDashboardLink"]
