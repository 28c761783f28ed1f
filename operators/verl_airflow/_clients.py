"""Two clients of Ray's Jobs API that do the same: one waits, the other is awaited.

Connection errors, silence, 429 and errors of the server that may pass are tried again with growing pauses; refusals are
raised at once. A submission may be tried again as well, since its id can be used once only.
"""

from __future__ import annotations

import asyncio
import random
import ssl
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote

import httpx
from tenacity import AsyncRetrying, RetryCallState, Retrying, retry_if_exception_type, stop_after_attempt

from verl_airflow._connection import RayAddress
from verl_airflow._jobs import (
    AlreadyExists,
    Answer,
    Call,
    Job,
    JobRequest,
    TryAgain,
    check_same,
    read_answer,
    submission,
    unreachable,
)
from verl_airflow._log_cursor import LogCursor
from verl_workflow.errors import ErrorCode, UserError, VerlWorkflowError

_FIRST_PAUSE_S = 0.5
_LONGEST_PAUSE_S = 30.0
_STOP_LOOK_S = 0.5


@dataclass(frozen=True, kw_only=True)
class Patience:
    """How long to try. `timeout_s` bounds the silence of one request, `attempts` their number."""

    timeout_s: float = 30.0
    attempts: int = 5

    def pause(self, state: RetryCallState) -> float:
        """Seconds before the next attempt: what the server asks for, or twice as long as the last."""
        failed = state.outcome.exception() if state.outcome is not None else None
        if isinstance(failed, TryAgain) and failed.after is not None:
            return min(failed.after, _LONGEST_PAUSE_S)
        # Not the same for all tasks that the same outage has met.
        return min(_FIRST_PAUSE_S * 2.0 ** (state.attempt_number - 1), _LONGEST_PAUSE_S) * random.uniform(0.75, 1.25)


class JobsClient:
    """The one that waits. Use it in a ``with`` statement."""

    def __init__(self, address: RayAddress, patience: Patience) -> None:
        self._where = address.url
        self._patience = patience
        self._http = httpx.Client(**_options(address, patience))

    def __enter__(self) -> JobsClient:
        return self

    def __exit__(self, *_: object) -> None:
        self._http.close()

    def version(self) -> str:
        """The cluster's version of Ray."""
        return str(self._ask(Call(method="GET", path="/api/version")).get("ray_version", ""))

    def submit(self, request: JobRequest, job_id: str, token: str) -> Job | None:
        """Submit under an id; see `RayJobsHook.submit`."""
        try:
            self._ask(submission(request, job_id, token))
        except AlreadyExists:
            found = self.job(job_id)
            check_same(found, request, self._where)
            return found
        return None

    def job(self, job_id: str) -> Job:
        """Raises VerlWorkflowError(JOB_UNKNOWN)."""
        return Job.from_json(self._ask(_about("GET", job_id)), job_id)

    def stop(self, job_id: str, timeout_s: float) -> Job:
        """Stop a job, and return when Ray says that it has ended."""
        self._ask(_about("POST", job_id, "/stop"))
        deadline = time.monotonic() + timeout_s
        while not (job := self.job(job_id)).status.ended:
            if time.monotonic() >= deadline:
                raise _not_stopped(job, self._where, timeout_s)
            time.sleep(_STOP_LOOK_S)
        return job

    def delete(self, job_id: str) -> None:
        """Let Ray forget a job that has ended."""
        _require_ended(self.job(job_id), self._where)
        self._ask(_about("DELETE", job_id))

    def logs(self, job_id: str) -> str:
        """All that the job has written so far."""
        return str(self._ask(_about("GET", job_id, "/logs")).get("logs", ""))

    def follow(self, job_id: str, cursor: LogCursor, poll_s: float) -> Iterator[str]:
        """The log's lines from where the cursor stands, until the job has ended."""
        while True:
            # Asked before the log is read: what is written in between is not missed.
            ended = self.job(job_id).status.ended
            yield from cursor.advance(self.logs(job_id), ended=ended)
            if ended:
                return
            time.sleep(poll_s)

    def _ask(self, call: Call) -> Any:
        retrying = Retrying(**_retrying(self._patience))
        try:
            return retrying(self._ask_once, call)
        except TryAgain as last:
            raise last.error from last

    def _ask_once(self, call: Call) -> Any:
        try:
            response = self._http.request(call.method, call.path, json=call.body)
        except httpx.TransportError as error:
            raise TryAgain(unreachable(self._where, _words(error))) from error
        return read_answer(call, _answer(response), self._where)


class AsyncJobsClient:
    """The one that is awaited, for triggers. Use it in an ``async with`` statement."""

    def __init__(self, address: RayAddress, patience: Patience) -> None:
        self._where = address.url
        self._patience = patience
        self._http = httpx.AsyncClient(**_options(address, patience))

    async def __aenter__(self) -> AsyncJobsClient:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._http.aclose()

    async def job(self, job_id: str) -> Job:
        """As `JobsClient.job`."""
        return Job.from_json(await self._ask(_about("GET", job_id)), job_id)

    async def logs(self, job_id: str) -> str:
        """As `JobsClient.logs`."""
        return str((await self._ask(_about("GET", job_id, "/logs"))).get("logs", ""))

    async def stop(self, job_id: str, timeout_s: float) -> Job:
        """As `JobsClient.stop`."""
        await self._ask(_about("POST", job_id, "/stop"))
        deadline = time.monotonic() + timeout_s
        while not (job := await self.job(job_id)).status.ended:
            if time.monotonic() >= deadline:
                raise _not_stopped(job, self._where, timeout_s)
            await asyncio.sleep(_STOP_LOOK_S)
        return job

    async def _ask(self, call: Call) -> Any:
        retrying = AsyncRetrying(**_retrying(self._patience))
        try:
            return await retrying(self._ask_once, call)
        except TryAgain as last:
            raise last.error from last

    async def _ask_once(self, call: Call) -> Any:
        try:
            response = await self._http.request(call.method, call.path, json=call.body)
        except httpx.TransportError as error:
            raise TryAgain(unreachable(self._where, _words(error))) from error
        return read_answer(call, _answer(response), self._where)


def _options(address: RayAddress, patience: Patience) -> dict[str, Any]:
    return {
        "base_url": address.url,
        "headers": {"Authorization": f"Bearer {address.token}"} if address.token else {},
        "verify": _verify(address),
        "timeout": patience.timeout_s,
        # Behind a login page everything is a redirect, and none of them is Ray's answer.
        "follow_redirects": False,
    }


def _verify(address: RayAddress) -> ssl.SSLContext | bool:
    if isinstance(address.verify, bool):
        return address.verify
    try:
        return ssl.create_default_context(cafile=address.verify)
    except OSError as error:
        raise UserError(
            ErrorCode.USAGE_INVALID,
            f"the connection's CA file cannot be used: {error}",
            where=address.url,
            value=address.verify,
            remedy="Name a PEM file that is on Airflow's machines, or leave it out.",
        ) from error


def _retrying(patience: Patience) -> dict[str, Any]:
    return {
        "retry": retry_if_exception_type(TryAgain),
        "stop": stop_after_attempt(patience.attempts),
        "wait": patience.pause,
        "reraise": True,
    }


def _about(method: str, job_id: str, more: str = "") -> Call:
    return Call(method=method, path=f"/api/jobs/{quote(job_id, safe='')}{more}", job_id=job_id)


def _answer(response: httpx.Response) -> Answer:
    asked = response.headers.get("Retry-After", "")
    return Answer(
        status=response.status_code, text=response.text, retry_after=float(asked) if asked.isdecimal() else None
    )


def _words(error: httpx.TransportError) -> str:
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__


def _require_ended(job: Job, where: str) -> None:
    if not job.status.ended:
        raise VerlWorkflowError(
            ErrorCode.JOB_RUNNING,
            f"the job is {job.status.value} and cannot be deleted",
            where=where,
            value=job.id,
            remedy="Stop it first.",
        )


def _not_stopped(job: Job, where: str, timeout_s: float) -> VerlWorkflowError:
    return VerlWorkflowError(
        ErrorCode.JOB_RUNNING,
        f"the job was asked to stop, and is still {job.status.value} after {timeout_s:g} s",
        where=where,
        value=job.id,
        remedy="See in Ray's dashboard what holds it, and stop it there.",
        retryable=True,
    )
