"""The hook to a Ray cluster: its Jobs API by HTTP, with neither Ray nor its client installed here."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from functools import cached_property

from airflow.sdk import BaseHook

from verl_airflow._clients import AsyncJobsClient, JobsClient, Patience
from verl_airflow._connection import CONNECTION_TYPE, DEFAULT_CONNECTION, RayAddress
from verl_airflow._jobs import Job, JobRequest
from verl_airflow._log_cursor import LogCursor
from verl_workflow.errors import VerlWorkflowError

_STOP_S = 60.0
_LOG_LOOK_S = 2.0


class RayJobsHook(BaseHook):
    """Submits, watches and stops jobs of the cluster that a connection names.

    Args:
        conn_id: a connection of type ``verl_workflow``.
        timeout_s: seconds without an answer after which a request counts as failed.
        attempts: how often a request is made before it is given up; refusals are not tried again.

    Raises (all methods):
        UserError: USAGE_INVALID, the connection cannot be understood; ACCESS_DENIED, Ray answers 401 or 403.
        VerlWorkflowError: CLUSTER_UNREACHABLE after all attempts; JOB_UNKNOWN; JOB_REFUSED.
    """

    conn_name_attr = "conn_id"
    default_conn_name = DEFAULT_CONNECTION
    conn_type = CONNECTION_TYPE
    hook_name = "verl_workflow (Ray)"

    def __init__(self, conn_id: str = DEFAULT_CONNECTION, *, timeout_s: float = 30.0, attempts: int = 5) -> None:
        super().__init__()
        self.conn_id = conn_id
        self._patience = Patience(timeout_s=timeout_s, attempts=attempts)

    @cached_property
    def address(self) -> RayAddress:
        """What the connection says. Not for triggers, which must not wait: they use `async_conn`."""
        return RayAddress.of(self.get_connection(self.conn_id))

    def get_conn(self) -> JobsClient:
        """A client, to be used in a ``with`` statement."""
        return JobsClient(self.address, self._patience)

    async def async_conn(self) -> AsyncJobsClient:
        """A client for triggers, to be used in an ``async with`` statement."""
        return AsyncJobsClient(RayAddress.of(await self.aget_connection(self.conn_id)), self._patience)

    def submit(self, request: JobRequest, job_id: str, *, token: str | None = None) -> Job | None:
        """Submit a job under an id, at most once however often the request is repeated.

        Args:
            job_id: never used before; Ray does not take an id twice, not even that of a job which was stopped.
            token: kept in the job's metadata, to know one's own submission again. By default a random one.

        Returns:
            None when it was submitted; the job that was found under the id, if that was asked to do the same.

        Raises:
            VerlWorkflowError(JOB_CONFLICT): the id belongs to a job that was asked to do something else.
        """
        with self.get_conn() as client:
            return client.submit(request, job_id, token or secrets.token_hex(8))

    def job(self, job_id: str) -> Job:
        """A job as it stands. Raises VerlWorkflowError(JOB_UNKNOWN)."""
        with self.get_conn() as client:
            return client.job(job_id)

    def stop(self, job_id: str, *, timeout_s: float = _STOP_S) -> Job:
        """Stop a job, and see that it has ended. One that has ended already is returned as it is.

        Raises:
            VerlWorkflowError: JOB_UNKNOWN; JOB_RUNNING, it goes on after `timeout_s`.
        """
        with self.get_conn() as client:
            return client.stop(job_id, timeout_s)

    def delete(self, job_id: str) -> None:
        """Let Ray forget a job. Raises VerlWorkflowError: JOB_UNKNOWN; JOB_RUNNING, it has not ended."""
        with self.get_conn() as client:
            client.delete(job_id)

    def follow_logs(
        self, job_id: str, cursor: LogCursor | None = None, *, poll_s: float = _LOG_LOOK_S
    ) -> Iterator[str]:
        """A job's log line by line until it has ended, each line once.

        Args:
            cursor: where to go on; it is moved, so that another call goes on there after an error.
            poll_s: seconds between looks; each transfers the whole log, for Ray gives no part of one.
        """
        with self.get_conn() as client:
            yield from client.follow(job_id, cursor or LogCursor(), poll_s)

    def test_connection(self) -> tuple[bool, str]:
        """Ask the cluster for its version; what the button in the connection's form does."""
        try:
            with JobsClient(self.address, Patience(timeout_s=10.0, attempts=1)) as client:
                version = client.version()
        except VerlWorkflowError as error:
            return False, str(error)
        return True, f"Ray {version} answers at {self.address.url}"
