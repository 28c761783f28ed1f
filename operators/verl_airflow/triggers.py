"""What waits in Airflow's triggerer. Cancelling a wait never stops anything; a user's action on the task always does.

Class paths and arguments of triggers are stored by Airflow: neither may be renamed once deployed.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from typing import Any

from airflow.triggers.base import BaseTrigger, TriggerEvent

from verl_airflow._ending import Ended, Ending
from verl_airflow._jobs import Job
from verl_airflow._log_cursor import LogCursor
from verl_airflow.hook import RayJobsHook
from verl_workflow.errors import ErrorCode, UserError, VerlWorkflowError

# Airflow gives a trigger 30 seconds to act on a kill.
_KILL_S = 20.0


class RayJobTrigger(BaseTrigger):
    """Waits until a job has ended, and tells its log in the task's log meanwhile.

    Args:
        conn_id: see `RayJobsHook`. job_id: to wait for.
        poll_interval: seconds between looks.
        deadline: Unix time at which the wait ends; None: never. The job goes on, and is for the operator to stop.
        unreachable_s: for how long the cluster may be silent before the wait ends.
        log_offset: characters of the log that have been told. A triggerer that restarts tells from here again.
        storage, run_id: the run that the job drives; a user's action on the task cancels it, too. Empty for none.
    """

    def __init__(
        self,
        *,
        conn_id: str,
        job_id: str,
        poll_interval: float = 10.0,
        deadline: float | None = None,
        unreachable_s: float = 600.0,
        log_offset: int = 0,
        storage: str = "",
        run_id: str = "",
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.conn_id = conn_id
        self.job_id = job_id
        self.poll_interval = poll_interval
        self.deadline = deadline
        self.unreachable_s = unreachable_s
        self.log_offset = log_offset
        self.storage = storage
        self.run_id = run_id

    def serialize(self) -> tuple[str, dict[str, Any]]:
        return (
            "verl_airflow.triggers.RayJobTrigger",
            {
                "conn_id": self.conn_id,
                "job_id": self.job_id,
                "poll_interval": self.poll_interval,
                "deadline": self.deadline,
                "unreachable_s": self.unreachable_s,
                "log_offset": self.log_offset,
                "storage": self.storage,
                "run_id": self.run_id,
            },
        )

    async def run(self) -> AsyncIterator[TriggerEvent]:
        yield _event(await self._ended())

    async def on_kill(self) -> None:
        """Stop the job, and cancel the run it drives: a user has marked the task, or cleared it."""
        # Neither is to be left undone because the other cannot be done.
        done = await asyncio.gather(self._cancel(), self._stop(), return_exceptions=True)
        # The job may have recorded its run in the meantime, and left it to a driver that outlives it.
        await self._cancel()
        for outcome in done:
            if isinstance(outcome, BaseException):
                raise outcome

    async def _cancel(self) -> None:
        if self.run_id:
            await asyncio.to_thread(cancel_run, self.storage, self.run_id)

    async def _stop(self) -> None:
        async with await RayJobsHook(self.conn_id, timeout_s=5.0, attempts=2).async_conn() as client:
            try:
                job = await client.stop(self.job_id, _KILL_S)
            except VerlWorkflowError as error:
                if error.code is not ErrorCode.JOB_UNKNOWN:
                    raise
            else:
                self.log.info("stopped %s, which is %s", self.job_id, job.status.value)

    async def _ended(self) -> Ended:
        cursor = LogCursor(self.log_offset)
        heard = time.monotonic()
        # One attempt a look: silence is counted here, and the deadline is kept meanwhile.
        hook = RayJobsHook(self.conn_id, timeout_s=min(30.0, self.unreachable_s), attempts=1)
        async with await hook.async_conn() as client:
            while True:
                if self.deadline is not None and time.time() >= self.deadline:
                    return self._end(Ending.DEADLINE, cursor, "its time is up")
                try:
                    job = await client.job(self.job_id)
                    self._tell(cursor, await client.logs(self.job_id), job)
                except UserError as error:
                    return self._end(Ending.REFUSED, cursor, str(error))
                except VerlWorkflowError as error:
                    if error.code is ErrorCode.JOB_UNKNOWN:
                        return self._end(Ending.LOST, cursor, str(error))
                    if time.monotonic() - heard >= self.unreachable_s:
                        return self._end(Ending.UNREACHABLE, cursor, str(error))
                    self.log.warning("%s", error)
                else:
                    heard = time.monotonic()
                    if job.status.ended:
                        return Ended.of(job, cursor.offset)
                await asyncio.sleep(self._pause())

    def _tell(self, cursor: LogCursor, text: str, job: Job) -> None:
        for line in cursor.advance(text, ended=job.status.ended):
            self.log.info("%s", line)

    def _end(self, ending: Ending, cursor: LogCursor, message: str) -> Ended:
        return Ended(ending=ending, job_id=self.job_id, message=message, log_offset=cursor.offset)

    def _pause(self) -> float:
        if self.deadline is None:
            return self.poll_interval
        return max(0.0, min(self.poll_interval, self.deadline - time.time()))


class VerlRunTrigger(BaseTrigger):
    """Waits until a run has ended or nobody drives it, whoever started it: by its journal, with no look at Ray.

    Args:
        storage, run_id: the run, which need not be there yet.
        poll_interval, deadline: as for `RayJobTrigger`.
        until: ``left``: nobody drives it; ``ended``: it has ended; ``final``: it has, and not by failing, after which
            somebody may resume it.
        cancels: whether a user's action on the task cancels the run.
    """

    def __init__(
        self,
        *,
        storage: str,
        run_id: str,
        poll_interval: float = 10.0,
        deadline: float | None = None,
        until: str = "left",
        cancels: bool = False,
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.storage = storage
        self.run_id = run_id
        self.poll_interval = poll_interval
        self.deadline = deadline
        self.until = until
        self.cancels = cancels

    def serialize(self) -> tuple[str, dict[str, Any]]:
        return (
            "verl_airflow.triggers.VerlRunTrigger",
            {
                "storage": self.storage,
                "run_id": self.run_id,
                "poll_interval": self.poll_interval,
                "deadline": self.deadline,
                "until": self.until,
                "cancels": self.cancels,
            },
        )

    async def run(self) -> AsyncIterator[TriggerEvent]:
        from verl_airflow._runs import find_run, holds

        while True:
            try:
                state = await asyncio.to_thread(find_run, self.storage, self.run_id)
            except VerlWorkflowError as error:
                if not error.retryable:
                    yield _event(Ended(ending=Ending.REFUSED, message=str(error)))
                    return
                self.log.warning("%s", error)
            else:
                if holds(state, self.until):
                    yield _event(Ended(ending=Ending.LEFT))
                    return
            if self.deadline is not None and time.time() >= self.deadline:
                yield _event(Ended(ending=Ending.DEADLINE, message="its time is up"))
                return
            await asyncio.sleep(self.poll_interval)

    async def on_kill(self) -> None:
        """Cancel the run, if the task is the one that runs it."""
        if self.cancels:
            await asyncio.to_thread(cancel_run, self.storage, self.run_id)


class ModelAliasTrigger(BaseTrigger):
    """Waits until an alias of the registry points where it is to point. See `ModelAliasSensor`."""

    def __init__(
        self,
        *,
        storage: str,
        model: str,
        alias: str,
        version: str | None = None,
        after: int = 0,
        poll_interval: float = 60.0,
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.storage = storage
        self.model = model
        self.alias = alias
        self.version = version
        self.after = after
        self.poll_interval = poll_interval

    def serialize(self) -> tuple[str, dict[str, Any]]:
        return (
            "verl_airflow.triggers.ModelAliasTrigger",
            {
                "storage": self.storage,
                "model": self.model,
                "alias": self.alias,
                "version": self.version,
                "after": self.after,
                "poll_interval": self.poll_interval,
            },
        )

    async def run(self) -> AsyncIterator[TriggerEvent]:
        from verl_airflow._models import moved_to

        while True:
            try:
                found = await asyncio.to_thread(
                    moved_to, self.storage, self.model, self.alias, version=self.version, after=self.after
                )
            except VerlWorkflowError as error:
                if not error.retryable:
                    yield TriggerEvent({"error": str(error)})  # type: ignore[no-untyped-call]
                    return
                self.log.warning("%s", error)
            else:
                if found is not None:
                    yield TriggerEvent(found)  # type: ignore[no-untyped-call]
                    return
            await asyncio.sleep(self.poll_interval)


def _event(ended: Ended) -> TriggerEvent:
    return TriggerEvent(ended.to_event())  # type: ignore[no-untyped-call]


def cancel_run(storage: str, run_id: str) -> None:
    """Ask a run to stop; no error when there is none, or when it has ended."""
    from verl_workflow.storage import Store
    from verl_workflow.workflow import request_cancel

    try:
        request_cancel(Store(storage), run_id)
    except UserError as error:
        if error.code not in {ErrorCode.RUN_UNKNOWN, ErrorCode.RUN_TERMINAL}:
            raise
