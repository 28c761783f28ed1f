"""A command as a task: any program, run as a Ray job."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from airflow.sdk.exceptions import AirflowFailException

from verl_airflow._ending import Ended, Ending
from verl_airflow._job_operator import JobOperator
from verl_airflow._jobs import JobRequest

if TYPE_CHECKING:
    from airflow.sdk import Context


class RayJobOperator(JobOperator):
    """Runs a command as a Ray job and succeeds when the command does.

    A worker, triggerer or connection that is lost does not end the job: the next try finds it again. A job that has
    failed, or that a cluster has forgotten together with its head, is submitted anew by the next try. A user who marks
    the task or clears it stops the job.

    Args:
        entrypoint: a shell command (templated).
        runtime_env: Ray's: ``working_dir``, ``env_vars``, ``pip`` and so on (templated).
        metadata: texts by name, shown in Ray's dashboard (templated).
        num_cpus, num_gpus, memory, custom_resources: reserved for the command itself, beside what its tasks ask for;
            memory is in bytes.
        final_exit_codes: codes of the command after which no retry is of use.
        kwargs: see `JobOperator`.

    Returns (XCom):
        ``{"job_id": ...}``.
    """

    template_fields: Sequence[str] = ("entrypoint", "runtime_env", "metadata")

    def __init__(
        self,
        *,
        entrypoint: str,
        runtime_env: Mapping[str, Any] | None = None,
        metadata: Mapping[str, str] | None = None,
        num_cpus: float | None = None,
        num_gpus: float | None = None,
        memory: int | None = None,
        custom_resources: Mapping[str, float] | None = None,
        final_exit_codes: Collection[int] = (),
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.entrypoint = entrypoint
        self.runtime_env = runtime_env
        self.metadata = metadata
        self.num_cpus = num_cpus
        self.num_gpus = num_gpus
        self.memory = memory
        self.custom_resources = custom_resources
        self.final_exit_codes = final_exit_codes

    def job_request(self, context: Context) -> JobRequest:
        return JobRequest(
            entrypoint=self.entrypoint,
            runtime_env=self.runtime_env or {},
            metadata=self.metadata or {},
            num_cpus=self.num_cpus,
            num_gpus=self.num_gpus,
            memory=self.memory,
            resources=self.custom_resources or {},
        )

    def job_result(self, context: Context) -> dict[str, Any]:
        return {"job_id": self._running_id or context["task_state_store"].get(self.external_id_key)}

    def fail(self, context: Context, ended: Ended) -> None:
        if ended.ending is Ending.FAILED and ended.exit_code in self.final_exit_codes:
            raise AirflowFailException(f"{ended.job_id}: exit code {ended.exit_code}: {ended.message}")
        super().fail(context, ended)
