"""How a wait for a job came to its end: what triggers tell operators, as plain JSON."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from verl_airflow._jobs import Job, JobStatus, shortened


class Ending(str, enum.Enum):
    """SUCCEEDED, FAILED, STOPPED: as Ray says of the job. LOST: Ray does not know the job any more. DEADLINE: it took
    too long, and goes on. UNREACHABLE: Ray was silent for too long; the job may go on. REFUSED: Ray does not let us
    look. LEFT: nobody drives the run any more, or it has ended; its journal says which.
    """

    SUCCEEDED = "succeeded"
    FAILED = "failed"
    STOPPED = "stopped"
    LOST = "lost"
    DEADLINE = "deadline"
    UNREACHABLE = "unreachable"
    REFUSED = "refused"
    LEFT = "left"


_OF_JOBS = {
    JobStatus.SUCCEEDED: Ending.SUCCEEDED,
    JobStatus.FAILED: Ending.FAILED,
    JobStatus.STOPPED: Ending.STOPPED,
}


@dataclass(frozen=True, kw_only=True)
class Ended:
    """One ending.

    Attributes:
        job_id: of the job that was waited for; empty when it was a run.
        message: why, in words. exit_code: of the job's command.
        log_offset: characters of its log that have been told.
    """

    ending: Ending
    job_id: str = ""
    message: str = ""
    exit_code: int | None = None
    log_offset: int = 0

    @classmethod
    def of(cls, job: Job, log_offset: int = 0) -> Ended:
        """The end of a job that has ended."""
        return cls(
            ending=_OF_JOBS[job.status],
            job_id=job.id,
            message=shortened(job.message),
            exit_code=job.exit_code,
            log_offset=log_offset,
        )

    def to_event(self) -> dict[str, Any]:
        """Plain JSON, for the database of Airflow."""
        return {**asdict(self), "ending": self.ending.value}

    @classmethod
    def from_event(cls, event: Mapping[str, Any]) -> Ended:
        """What `to_event` gave."""
        return cls(**{**event, "ending": Ending(event["ending"])})
