"""Ray's Jobs API as values: what is asked, what is answered, and what an answer means. Sends nothing itself."""

from __future__ import annotations

import enum
import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from verl_workflow.errors import ErrorCode, UserError, VerlWorkflowError
from verl_workflow.stored_json import parse_json

# Names in a job's metadata: what it was asked to run, and which submission it is.
FINGERPRINT = "verl_workflow_fingerprint"
TOKEN = "verl_workflow_token"
_SHOWN = 1_000


class JobStatus(str, enum.Enum):
    """Ray's states of a job. STOPPED: somebody has stopped it."""

    PENDING = "PENDING"
    RUNNING = "RUNNING"
    STOPPED = "STOPPED"
    SUCCEEDED = "SUCCEEDED"
    FAILED = "FAILED"

    @property
    def ended(self) -> bool:
        """Whether it stays so."""
        return self not in {JobStatus.PENDING, JobStatus.RUNNING}


@dataclass(frozen=True, kw_only=True)
class JobRequest:
    """A command to run on a cluster.

    Attributes:
        entrypoint: a shell command. runtime_env: Ray's. metadata: texts by name, shown in Ray's dashboard.
        num_cpus, num_gpus, memory, resources: reserved for the command itself; memory is in bytes.
    """

    entrypoint: str
    runtime_env: Mapping[str, Any] = field(default_factory=dict)
    metadata: Mapping[str, str] = field(default_factory=dict)
    num_cpus: float | None = None
    num_gpus: float | None = None
    memory: int | None = None
    resources: Mapping[str, float] = field(default_factory=dict)

    @property
    def fingerprint(self) -> str:
        """Digest of all that decides what the job does; the metadata does not."""
        told = {name: value for name, value in self.payload().items() if name != "metadata"}
        return hashlib.sha256(json.dumps(told, sort_keys=True).encode()).hexdigest()

    def payload(self) -> dict[str, Any]:
        """The body of a submission, without an id."""
        wanted = {
            "entrypoint": self.entrypoint,
            "runtime_env": dict(self.runtime_env),
            "metadata": dict(self.metadata),
            "entrypoint_num_cpus": self.num_cpus,
            "entrypoint_num_gpus": self.num_gpus,
            "entrypoint_memory": self.memory,
            "entrypoint_resources": dict(self.resources),
        }
        return {name: value for name, value in wanted.items() if value is not None and value != {}}


@dataclass(frozen=True, kw_only=True)
class Job:
    """A job as Ray tells it.

    Attributes:
        message: why it is in its state, in Ray's words; for a failed command with the end of its log.
        exit_code: of the command; None while it runs, and when Ray does not know.
    """

    id: str
    status: JobStatus
    message: str = ""
    exit_code: int | None = None
    metadata: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def from_json(cls, data: Any, job_id: str) -> Job:
        """Raises VerlWorkflowError(CLUSTER_UNREACHABLE) when this is no job: whatever answers there is not Ray."""
        try:
            code = data.get("driver_exit_code")
            return cls(
                id=job_id,
                status=JobStatus(data["status"]),
                message=str(data.get("message") or ""),
                exit_code=code if isinstance(code, int) else None,
                metadata=dict(data.get("metadata") or {}),
            )
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise no_ray("/api/jobs/", str(data)) from error


@dataclass(frozen=True, kw_only=True)
class Call:
    """One request. `path` begins with a slash; `job_id` is the job it is about, empty for none."""

    method: str
    path: str
    job_id: str = ""
    body: Mapping[str, Any] | None = None


@dataclass(frozen=True, kw_only=True)
class Answer:
    """An HTTP response as far as it matters. `retry_after` is in seconds."""

    status: int
    text: str
    retry_after: float | None = None


class TryAgain(Exception):
    """The same request may succeed in a moment.

    Args:
        error: what to raise when it does not. after: seconds that the server asks to wait.
    """

    def __init__(self, error: VerlWorkflowError, after: float | None = None) -> None:
        super().__init__(str(error))
        self.error = error
        self.after = after


class AlreadyExists(Exception):
    """The submission id is taken."""


def read_answer(call: Call, answer: Answer, where: str) -> Any:
    """The JSON that was answered.

    Args:
        where: the cluster, for messages.

    Raises:
        TryAgain: 429, or an error of the server that may pass.
        AlreadyExists: a submission whose id is taken; Ray answers it with 500, and with 400 below.
        UserError(ACCESS_DENIED): 401 or 403.
        VerlWorkflowError: JOB_UNKNOWN, JOB_REFUSED or CLUSTER_UNREACHABLE.
    """
    if answer.status < 300:
        try:
            return parse_json(answer.text)
        except ValueError as error:
            raise no_ray(where, answer.text) from error
    if answer.status < 400:
        # Redirected, most likely to a page to log in at.
        raise no_ray(where, f"{answer.status} {answer.text}")
    if answer.status in {401, 403}:
        raise UserError(
            ErrorCode.ACCESS_DENIED,
            f"Ray refuses access ({answer.status}): {shortened(answer.text)}",
            where=where,
            remedy="Put the token of the cluster into the connection's Ray token.",
        )
    if answer.status == 404 and call.job_id:
        raise VerlWorkflowError(
            ErrorCode.JOB_UNKNOWN,
            "the cluster knows no such job; one that has lost its head has forgotten all",
            where=where,
            value=call.job_id,
            remedy="Submit it anew.",
        )
    if call.body is not None and "already exists" in answer.text:
        raise AlreadyExists(call.job_id)
    # The head passes on what its agent says: the request itself is at fault when that was 400.
    ours = answer.status < 500 or "Request failed with status code 400" in answer.text
    if answer.status == 429 or not ours:
        failed = VerlWorkflowError(
            ErrorCode.CLUSTER_UNREACHABLE,
            f"Ray answers {answer.status} to {call.method} {call.path}: {shortened(answer.text)}",
            where=where,
            remedy="See whether the cluster's head is well, and try again.",
            retryable=True,
        )
        raise TryAgain(failed, answer.retry_after)
    raise VerlWorkflowError(
        ErrorCode.JOB_REFUSED,
        f"Ray refuses {call.method} {call.path} ({answer.status}): {shortened(answer.text)}",
        where=where,
        remedy="Mend what it names in the task's arguments.",
    )


def submission(request: JobRequest, job_id: str, token: str) -> Call:
    """The request that submits a job under an id.

    Args:
        token: told of this submission alone. By it a job that is found under the id can be told from an older one.
    """
    payload = request.payload()
    payload["submission_id"] = job_id
    payload["metadata"] = {**request.metadata, FINGERPRINT: request.fingerprint, TOKEN: token}
    return Call(method="POST", path="/api/jobs/", job_id=job_id, body=payload)


def check_same(found: Job, request: JobRequest, where: str) -> None:
    """Raise VerlWorkflowError(JOB_CONFLICT) unless the job under the id was asked to do the same."""
    if found.metadata.get(FINGERPRINT) != request.fingerprint:
        raise VerlWorkflowError(
            ErrorCode.JOB_CONFLICT,
            "another job has this submission id: it was asked to run something else",
            where=where,
            value=found.id,
            remedy="See what has submitted it; Ray's ids are used once only.",
        )


def unreachable(where: str, why: str) -> VerlWorkflowError:
    """The error for a cluster that does not answer."""
    return VerlWorkflowError(
        ErrorCode.CLUSTER_UNREACHABLE,
        f"Ray's Jobs API does not answer: {why}",
        where=where,
        remedy="Check the connection's address, and that the cluster's head runs.",
        retryable=True,
    )


def no_ray(where: str, text: str) -> VerlWorkflowError:
    """The error for an answer that Ray would not give."""
    return VerlWorkflowError(
        ErrorCode.CLUSTER_UNREACHABLE,
        "what answers there is not Ray's Jobs API",
        where=where,
        value=shortened(text),
        remedy="Check the connection's address: it is that of Ray's dashboard, port 8265 by default.",
    )


def shortened(text: str) -> str:
    """The end of what a server says, in one line: Ray answers with tracebacks."""
    said = " ".join(text.split())
    return said if len(said) <= _SHOWN else f"…{said[-_SHOWN:]}"
