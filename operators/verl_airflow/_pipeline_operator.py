"""A whole pipeline run as one task: its journal says what became of it, whoever drove it."""

from __future__ import annotations

import json
import shlex
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from airflow.sdk.exceptions import AirflowException, AirflowFailException

from verl_airflow._ending import Ended, Ending
from verl_airflow._generations import RunRecord, TaskIdentity
from verl_airflow._job_operator import JobOperator
from verl_airflow._jobs import JobRequest, JobStatus
from verl_airflow._storage import storage_uri
from verl_airflow.triggers import RayJobTrigger, VerlRunTrigger, cancel_run

if TYPE_CHECKING:
    from airflow.sdk import Context

    from verl_workflow.workflow import RunState

# The command line's code for a mistake in its input: nothing was recorded.
_USER_ERROR = 2


class VerlPipelineOperator(JobOperator):
    """Runs a pipeline, ``verl-workflow run``, as a Ray job, and takes it up again, ``verl-workflow resume``.

    A retry resumes the run: what has been committed is not done again. The run may also be resumed or ended by
    somebody else in between, such as the command line: the task then waits for it, and ends as it does. A user who
    marks the task or clears it cancels the run, for good. A task that is cleared after that, after its success, or
    after a failure that somebody had to mend, starts a new run, named with ``.2`` and so on, which re-uses the stages
    that were finished.

    Args:
        pipeline: the file, as the cluster sees it: absolute, or below the ``working_dir`` of `runtime_env` (templated).
        pipeline_params: values of the pipeline's parameters (templated). Values that are no texts are written as JSON.
        run_id: by default made from the names of DAG, DAG run and task (templated).
        storage: URI, as seen from the cluster and from Airflow alike (templated). Default: that of the connection.
        fresh: re-use no results of earlier runs.
        command: how the command line is called on the cluster.
        runtime_env: Ray's, for the command (templated).
        kwargs: see `JobOperator`. At the `deadline` the run is cancelled, too.

    Returns (XCom):
        ``run_id``, ``storage``, ``status``, ``seconds``, ``scores``, ``rewards``, ``promoted``, ``version``, ``model``.

    Raises:
        AirflowFailException: the run failed by its configuration, data, reward or numbers, or was cancelled.
        AirflowException: it failed by anything else; a retry resumes it.
    """

    template_fields: Sequence[str] = ("pipeline", "pipeline_params", "run_id", "storage", "runtime_env")

    def __init__(
        self,
        *,
        pipeline: str,
        pipeline_params: Mapping[str, Any] | None = None,
        run_id: str | None = None,
        storage: str | None = None,
        fresh: bool = False,
        command: str = "verl-workflow",
        runtime_env: Mapping[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.pipeline = pipeline
        self.pipeline_params = pipeline_params
        self.run_id = run_id
        self.storage = storage
        self.fresh = fresh
        self.command = command
        self.runtime_env = runtime_env
        self._driven_id = ""

    def submit_job(self, context: Context) -> Any:
        """As `JobOperator.submit_job`; None when there is nothing to submit, for the run has ended or is driven."""
        from verl_airflow._runs import is_driven
        from verl_workflow.workflow import RunStatus

        run = self._due_run(context)
        if is_driven(run) or (run is not None and run.status is RunStatus.SUCCEEDED):
            return None
        return super().submit_job(context)

    def job_request(self, context: Context) -> JobRequest:
        run_id = self._current_id(context)
        words = shlex.split(self.command)
        if self._find(run_id) is None:
            words += ["run", self.pipeline, "--run-id", run_id]
            for name, value in (self.pipeline_params or {}).items():
                words += ["-p", f"{name}={_text(value)}"]
            words += ["--fresh"] if self.fresh else []
        else:
            words += ["resume", run_id]
        return JobRequest(
            entrypoint=shlex.join([*words, "--storage", self._storage]),
            runtime_env=self.runtime_env or {},
            metadata={"verl_workflow_run": run_id},
        )

    def get_job_status(self, external_id: Any, context: Context) -> str:
        """The job's status, unless the journal knows better: the run outlives the job that started it."""
        from verl_airflow._runs import is_driven
        from verl_workflow.workflow import RunStatus

        run = self._find(self._current_id(context))
        if run is not None and run.status is RunStatus.SUCCEEDED:
            return JobStatus.SUCCEEDED.value
        status = super().get_job_status(external_id, context)
        if self.is_job_active(status) or not is_driven(run):
            return status if self.is_job_active(status) else JobStatus.FAILED.value
        return JobStatus.RUNNING.value

    def poll_until_complete(self, external_id: Any, context: Context) -> None:
        self._driven_id = self._current_id(context)
        if external_id is None:
            self.settle(context, Ended(ending=Ending.LEFT))
        else:
            super().poll_until_complete(external_id, context)

    def job_trigger(self, job_id: str, context: Context) -> RayJobTrigger:
        trigger = super().job_trigger(job_id, context)
        trigger.storage, trigger.run_id = self._storage, self._current_id(context)
        return trigger

    def settle(self, context: Context, ended: Ended) -> None:
        """As `JobOperator.settle`, by what the journal says."""
        from verl_airflow._runs import is_driven
        from verl_workflow.workflow import RunStatus

        run_id = self._current_id(context)
        self._driven_id = run_id
        run = self._find(run_id)
        status = None if run is None else run.status
        if status is RunStatus.SUCCEEDED:
            return
        if ended.ending in {Ending.DEADLINE, Ending.UNREACHABLE, Ending.REFUSED}:
            self.fail(context, ended)
        cleared = self.was_cleared(context)
        if run is not None and is_driven(run):
            if run.cancel_requested and cleared:
                self._note_cleared(context)
            self._wait_for_run(context)
        elif run is not None and status is RunStatus.FAILED:
            self._fail_by(run)
        elif cleared and (status is RunStatus.CANCELLED or ended.ending is Ending.STOPPED):
            self.log.info("the run %s was stopped together with the try before this one", run_id)
            self.again(context)
        elif status is RunStatus.CANCELLED:
            raise AirflowFailException(f"the run {run_id} was cancelled. Clear the task to start a new one.")
        elif ended.ending is Ending.LEFT and not self.is_of_this_try(context):
            self.log.info("nobody drives the run %s any more: it is taken up", run_id)
            self.again(context)
        elif run is None and ended.ending is Ending.FAILED and ended.exit_code == _USER_ERROR:
            raise AirflowFailException(f"nothing was started: {ended.message}")
        else:
            # At most one job a try: what keeps killing drivers is to meet the limit of retries.
            raise AirflowException(f"the run {run_id} has not ended ({ended.ending.value}): {ended.message}")

    def fail(self, context: Context, ended: Ended) -> None:
        if ended.ending is Ending.DEADLINE and not ended.job_id:
            cancel_run(self._storage, self._driven_id)
            raise AirflowException(f"the run {self._driven_id} took longer than its deadline, and was cancelled")
        super().fail(context, ended)

    def stop(self, job_id: str) -> None:
        """Stop the job, and cancel the run: its driver is not the job, and would go on."""
        try:
            cancel_run(self._storage, self._driven_id)
        finally:
            super().stop(job_id)
        # The job may have recorded its run in the meantime.
        cancel_run(self._storage, self._driven_id)

    def on_kill(self) -> None:
        if self._driven_id and not self._running_id:
            cancel_run(self._storage, self._driven_id)
        super().on_kill()

    def job_result(self, context: Context) -> dict[str, Any]:
        from verl_airflow._runs import result_of

        store = context["task_state_store"]
        record = RunRecord.read(store)
        run = self._find(record.run_id(self._base_id(context)))
        assert run is not None, "it has succeeded"
        RunRecord(number=record.number, finished=True).write(store)
        return result_of(run, self._storage)

    def _note_cleared(self, context: Context) -> None:
        """Its steps may take longer to stop than a clear is remembered."""
        attached = self._attached(context)
        if attached is not None:
            replace(attached, cleared=True).write(context["task_state_store"])

    def _wait_for_run(self, context: Context) -> None:
        run_id = self._current_id(context)
        self._note_attached(context)
        self.log.info("waiting for the driver of %s, which is not this task's job", run_id)
        deadline = self.deadline_from_now()
        if self.deferrable:
            trigger = VerlRunTrigger(
                storage=self._storage, run_id=run_id, poll_interval=self.poll_interval, deadline=deadline, cancels=True
            )
            self.defer(trigger=trigger, method_name="execute_complete")
        from verl_airflow._runs import is_driven

        while is_driven(self._find(run_id)):
            if deadline is not None and time.time() >= deadline:
                self.fail(context, Ended(ending=Ending.DEADLINE))
            time.sleep(self.poll_interval)
        self.settle(context, Ended(ending=Ending.LEFT))

    def _fail_by(self, run: RunState) -> None:
        from verl_airflow._runs import failure_of

        failure = failure_of(run.error or {})
        told = (
            f"the run {run.run_id} failed ({failure.kind.value}): {failure.message} "
            f"See: verl-workflow explain {run.run_id} --storage {shlex.quote(self._storage)}"
        )
        raise (AirflowFailException if failure.hopeless else AirflowException)(told)

    def _due_run(self, context: Context) -> RunState | None:
        """The run to go on with, of which the number is on record then; None when it is to be started.

        One that was cancelled cannot go on, and one that this task has finished is not wanted again. One whose author
        had to mend something would go on as it was defined: with the mistake in it.
        """
        from verl_airflow._runs import failure_of
        from verl_workflow.workflow import RunStatus

        store = context["task_state_store"]
        record = RunRecord.read(store)
        while (run := self._find(record.run_id(self._base_id(context)))) is not None:
            done = run.status is RunStatus.SUCCEEDED and record.finished
            hopeless = run.status is RunStatus.FAILED and failure_of(run.error or {}).hopeless
            if not (done or hopeless or run.status is RunStatus.CANCELLED):
                break
            record = RunRecord(number=record.number + 1)
        (record if run is not None else RunRecord(number=record.number)).write(store)
        return run

    def _current_id(self, context: Context) -> str:
        return RunRecord.read(context["task_state_store"]).run_id(self._base_id(context))

    def _base_id(self, context: Context) -> str:
        return self.run_id or TaskIdentity.of(context).name

    def _find(self, run_id: str) -> RunState | None:
        from verl_airflow._runs import find_run

        return find_run(self._storage, run_id)

    @property
    def _storage(self) -> str:
        return storage_uri(self.storage, self.hook, self.task_id)


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)
