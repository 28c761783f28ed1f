"""Functions as tasks."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from airflow.sdk.bases.decorator import DecoratedOperator, TaskDecorator, determine_kwargs, task_decorator_factory
from airflow.sdk.exceptions import AirflowFailException

from verl_airflow._jobs import JobRequest
from verl_airflow._ray_job_operator import RayJobOperator

if TYPE_CHECKING:
    from airflow.sdk import Context


class _RayJobDecoratedOperator(DecoratedOperator, RayJobOperator):
    """A `RayJobOperator` whose command a function returns, each time that a job is to be submitted."""

    custom_operator_name = "@task.ray_job"
    template_fields: Sequence[str] = (
        *DecoratedOperator.template_fields,
        *(name for name in RayJobOperator.template_fields if name != "entrypoint"),
    )

    def __init__(
        self,
        *,
        python_callable: Callable[..., Any],
        op_args: Collection[Any] | None = None,
        op_kwargs: Mapping[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(
            python_callable=python_callable, op_args=op_args, op_kwargs=op_kwargs, **{"entrypoint": "", **kwargs}
        )

    def job_request(self, context: Context) -> JobRequest:
        # Not in `execute`: what is set there is lost when the task is deferred.
        arguments = determine_kwargs(self.python_callable, self.op_args, {**context, **self.op_kwargs})
        command = self.python_callable(*self.op_args, **arguments)
        if not isinstance(command, str) or not command.strip():
            raise AirflowFailException(
                f"the function of {self.task_id} has to return a command, and returned {command!r}"
            )
        self.entrypoint = command
        return super().job_request(context)


def ray_job_task(python_callable: Callable[..., Any] | None = None, **kwargs: Any) -> TaskDecorator:
    """``@task.ray_job``: the function returns the command that is run as a Ray job.

    Args:
        kwargs: of `RayJobOperator`, without `entrypoint`.
    """
    return task_decorator_factory(
        python_callable=python_callable, decorated_operator_class=_RayJobDecoratedOperator, **kwargs
    )
