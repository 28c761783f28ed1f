"""What all tasks that run a Ray job do alike: submit once, survive, wait without a worker, and end as the job does."""

from __future__ import annotations

import time
from abc import abstractmethod
from collections.abc import Mapping
from datetime import timedelta
from functools import cached_property
from typing import TYPE_CHECKING, Any

from airflow.sdk import BaseOperator, ResumableJobMixin
from airflow.sdk.exceptions import AirflowException, AirflowFailException

from verl_airflow._connection import DEFAULT_CONNECTION
from verl_airflow._ending import Ended, Ending
from verl_airflow._final_errors import final_errors
from verl_airflow._generations import Attached, TaskIdentity, current_generation, next_generation
from verl_airflow._jobs import TOKEN, Job, JobRequest, JobStatus
from verl_airflow._log_cursor import LogCursor
from verl_airflow.hook import RayJobsHook
from verl_airflow.links import DASHBOARD_KEY, RayDashboardLink, dashboard_url
from verl_airflow.triggers import RayJobTrigger
from verl_workflow.errors import ErrorCode, VerlWorkflowError

if TYPE_CHECKING:
    from airflow.sdk import Context

_MOST_USED_IDS = 100
_KILLED_WITHIN_S = 120.0


class JobOperator(ResumableJobMixin, BaseOperator):
    """A task that runs one Ray job after the other until one has succeeded, each under an id of its own.

    Args:
        conn_id: a connection of type ``verl_workflow``.
        deferrable: wait in the triggerer, without a worker's slot. Default True.
        poll_interval: seconds between looks at the job.
        deadline: seconds, or a timedelta, that a try may wait for its job; the job is then stopped, and the try fails.
            By default `execution_timeout`, which by itself does not count while a task is deferred; None of both:
            there is no limit.
        unreachable_s: for how long the cluster may be silent before a try fails; the next one finds the job again.
    """

    # Airflow keeps it in its database: renamed, it would let a running task submit a second job.
    external_id_key = "ray_submission_id"
    operator_extra_links = (RayDashboardLink(),)

    def __init__(
        self,
        *,
        conn_id: str = DEFAULT_CONNECTION,
        deferrable: bool = True,
        poll_interval: float = 10.0,
        deadline: timedelta | float | None = None,
        unreachable_s: float = 600.0,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.conn_id = conn_id
        self.deferrable = deferrable
        self.poll_interval = poll_interval
        self.deadline = deadline
        self.unreachable_s = unreachable_s
        self._running_id = ""

    @cached_property
    def hook(self) -> RayJobsHook:
        return RayJobsHook(self.conn_id)

    @abstractmethod
    def job_request(self, context: Context) -> JobRequest:
        """What to run, when a job is to be submitted."""

    @abstractmethod
    def job_result(self, context: Context) -> Any:
        """What the task returns once it has succeeded: plain JSON, and small."""

    def execute(self, context: Context) -> Any:
        """Submit the job, or find the one that an earlier try has submitted, and wait for it."""
        with final_errors():
            self.execute_resumable(context)
            return self._succeeded(context)

    def execute_complete(self, context: Context, event: Mapping[str, Any]) -> Any:
        """Go on when the trigger has seen the wait's end."""
        ended = Ended.from_event(event)
        self._running_id = ended.job_id
        with final_errors():
            self.settle(context, ended)
            return self._succeeded(context)

    def on_kill(self) -> None:
        """Stop the job when a user kills the task while a worker has it."""
        if self._running_id:
            self.stop(self._running_id)

    def submit_job(self, context: Context) -> Any:
        request = self.job_request(context)
        store, ti = context["task_state_store"], context["ti"]
        for _ in range(_MOST_USED_IDS):
            generation = next_generation(store, TaskIdentity.of(context), ti.try_number)
            store.set(self.external_id_key, generation.job_id)
            found = self.hook.submit(request, generation.job_id, token=generation.token)
            mine = found is None or found.metadata.get(TOKEN) == generation.token
            if mine or (found is not None and not found.status.ended):
                self._running_id = generation.job_id
                self.log.info("%s %s", "submitted" if mine else "attached to", generation.job_id)
                ti.xcom_push(key=DASHBOARD_KEY, value=self._dashboard(generation.job_id))
                return generation.job_id
            # A DAG run of the same name was deleted: its ids are used, and what it did is not what is asked for now.
            self.log.info("the id %s was used by an earlier job, which has ended", generation.job_id)
        raise AirflowException(f"{_MOST_USED_IDS} submission ids in a row are used already, up to {generation.job_id}")

    def get_job_status(self, external_id: Any, context: Context) -> str:
        job = self.find_job(str(external_id))
        return job.status.value if job is not None else Ending.LOST.value

    def is_job_active(self, status: str) -> bool:
        return status in {JobStatus.PENDING.value, JobStatus.RUNNING.value}

    def is_job_succeeded(self, status: str) -> bool:
        return status == JobStatus.SUCCEEDED.value

    def poll_until_complete(self, external_id: Any, context: Context) -> None:
        """Wait; returns only when the task has succeeded."""
        self._running_id = str(external_id)
        self._note_attached(context)
        if self.deferrable:
            self.defer(trigger=self.job_trigger(str(external_id), context), method_name="execute_complete")
        self.settle(context, self._watched(str(external_id)))

    def get_job_result(self, external_id: Any, context: Context) -> Any:
        """Nothing: `execute` asks for the result itself, since the mixin asks only some of the times."""
        return None

    def job_trigger(self, job_id: str, context: Context) -> RayJobTrigger:
        """What waits for the job."""
        return RayJobTrigger(
            conn_id=self.conn_id,
            job_id=job_id,
            poll_interval=self.poll_interval,
            deadline=self.deadline_from_now(),
            unreachable_s=self.unreachable_s,
        )

    def settle(self, context: Context, ended: Ended) -> None:
        """Return when the task has succeeded; wait on when a new job is due; raise when this try has failed."""
        if ended.ending is Ending.SUCCEEDED:
            return
        if ended.ending is Ending.STOPPED and self.was_cleared(context):
            self.log.info("%s was stopped together with the try before this one", ended.job_id)
            self.again(context)
        else:
            self.fail(context, ended)

    def fail(self, context: Context, ended: Ended) -> None:
        """Raise what ends this try.

        Raises:
            AirflowFailException: no retry is of use. AirflowException: one may be.
        """
        if ended.ending is Ending.DEADLINE:
            self.stop(ended.job_id)
            raise AirflowException(f"{ended.job_id} took longer than its deadline allows, and was stopped")
        if ended.ending is Ending.STOPPED:
            raise AirflowFailException(f"{ended.job_id} was stopped in Ray. Clear the task to run it again.")
        raise AirflowException(f"{ended.job_id or 'the job'}: {ended.ending.value}: {ended.message}")

    def again(self, context: Context) -> None:
        """Submit the next generation, and wait for it."""
        job_id = self.submit_job(context)
        self.poll_until_complete(job_id, context)

    def stop(self, job_id: str) -> None:
        """Stop a job and see that it has ended; no error when Ray has forgotten it."""
        try:
            job = self.hook.stop(job_id)
        except VerlWorkflowError as error:
            if error.code is not ErrorCode.JOB_UNKNOWN:
                raise
        else:
            self.log.info("stopped %s, which is %s", job_id, job.status.value)

    def find_job(self, job_id: str) -> Job | None:
        """A job, or None when the cluster does not know it."""
        try:
            return self.hook.job(job_id)
        except VerlWorkflowError as error:
            if error.code is ErrorCode.JOB_UNKNOWN:
                return None
            raise

    def is_of_this_try(self, context: Context) -> bool:
        """Whether this try has submitted a job already."""
        generation = current_generation(context["task_state_store"])
        return generation is not None and generation.try_number == context["ti"].try_number

    def was_cleared(self, context: Context) -> bool:
        """Whether what this try had found was stopped because a user cleared the task while it was deferred.

        Airflow then kills the old try's trigger at about the time at which the new try starts.
        """
        attached = self._attached(context)
        if attached is None or self.is_of_this_try(context):
            return False
        return attached.cleared or time.time() - attached.at < _KILLED_WITHIN_S + self.poll_interval

    def deadline_from_now(self) -> float | None:
        """Unix time."""
        limit = self.deadline if self.deadline is not None else self.execution_timeout
        if limit is None:
            return None
        return time.time() + (limit.total_seconds() if isinstance(limit, timedelta) else limit)

    def _succeeded(self, context: Context) -> Any:
        result = self.job_result(context)
        # Kept, it would make a task that is cleared after its success succeed again without doing anything.
        context["task_state_store"].delete(self.external_id_key)
        return result

    def _watched(self, job_id: str) -> Ended:
        """Wait in this process, and tell the log meanwhile."""
        deadline, cursor, heard = self.deadline_from_now(), LogCursor(), time.monotonic()
        while True:
            if deadline is not None and time.time() >= deadline:
                return Ended(ending=Ending.DEADLINE, job_id=job_id)
            try:
                job = self.hook.job(job_id)
                self._tell(cursor, job)
            except VerlWorkflowError as error:
                if error.code is ErrorCode.JOB_UNKNOWN:
                    return Ended(ending=Ending.LOST, job_id=job_id, message=str(error))
                if not error.retryable or time.monotonic() - heard >= self.unreachable_s:
                    raise
                self.log.warning("%s", error)
            else:
                heard = time.monotonic()
                if job.status.ended:
                    return Ended.of(job, cursor.offset)
            time.sleep(self.poll_interval)

    def _tell(self, cursor: LogCursor, job: Job) -> None:
        with self.hook.get_conn() as client:
            for line in cursor.advance(client.logs(job.id), ended=job.status.ended):
                self.log.info("%s", line)

    def _attached(self, context: Context) -> Attached | None:
        """What this try has found, None when nothing."""
        attached = Attached.read(context["task_state_store"])
        return attached if attached is not None and attached.try_number == context["ti"].try_number else None

    def _note_attached(self, context: Context) -> None:
        if not self.is_of_this_try(context) and self._attached(context) is None:
            Attached(try_number=context["ti"].try_number, at=time.time()).write(context["task_state_store"])

    def _dashboard(self, job_id: str) -> str:
        return dashboard_url(self.hook.address.dashboard_url, job_id)
