"""Which errors end a task for good."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from airflow.sdk.exceptions import AirflowFailException

from verl_workflow.errors import ErrorCode, UserError, VerlWorkflowError

# Refusals that concern what was asked for.
_FINAL = frozenset({ErrorCode.JOB_CONFLICT, ErrorCode.JOB_REFUSED, ErrorCode.MODEL_INVALID})


@contextmanager
def final_errors() -> Iterator[None]:
    """Mistakes of the DAG's author end a task for good. A token may be mended while the job goes on."""
    try:
        yield
    except VerlWorkflowError as error:
        mistake = isinstance(error, UserError) and error.code is not ErrorCode.ACCESS_DENIED
        if mistake or error.code in _FINAL:
            raise AirflowFailException(str(error)) from error
        raise
