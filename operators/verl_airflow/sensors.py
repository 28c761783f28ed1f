"""Tasks that wait for what others do: for a run to end, or for an alias of a model to move."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from airflow.sdk import BaseSensorOperator, PokeReturnValue
from airflow.sdk.exceptions import AirflowException, AirflowFailException

from verl_airflow._connection import DEFAULT_CONNECTION
from verl_airflow._ending import Ended, Ending
from verl_airflow._final_errors import final_errors
from verl_airflow._storage import storage_uri
from verl_airflow.hook import RayJobsHook
from verl_airflow.triggers import ModelAliasTrigger, VerlRunTrigger

if TYPE_CHECKING:
    from airflow.sdk import Context
    from airflow.triggers.base import BaseTrigger

__all__ = ["ModelAliasSensor", "VerlRunSensor"]


class _StorageSensor(BaseSensorOperator):
    """Looks once, and waits in the triggerer if what it waits for is not there."""

    def __init__(
        self,
        *,
        storage: str | None = None,
        conn_id: str = DEFAULT_CONNECTION,
        deferrable: bool = True,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.storage = storage
        self.conn_id = conn_id
        self.deferrable = deferrable

    def execute(self, context: Context) -> Any:
        with final_errors():
            if not self.deferrable:
                return super().execute(context)
            found = self.poke(context)
            if isinstance(found, PokeReturnValue) and found:
                return found.xcom_value
            self.defer(trigger=self.trigger(), method_name="execute_complete", timeout=timedelta(seconds=self.timeout))

    def trigger(self) -> BaseTrigger:
        raise NotImplementedError

    @property
    def storage_uri(self) -> str:
        return storage_uri(self.storage, RayJobsHook(self.conn_id), self.task_id)


class VerlRunSensor(_StorageSensor):
    """Waits until a run has succeeded, whoever runs it: it need not be there yet.

    Args:
        run_id: of the run (templated).
        storage: URI (templated). Default: that of the connection.
        fail_fast: a run that has failed fails the sensor, as by default; otherwise it waits for its resumption.
        deferrable: wait in the triggerer. Default True.
        kwargs: of Airflow's sensors: `poke_interval`, `timeout`, `soft_fail` and so on.

    Returns (XCom):
        As `VerlPipelineOperator`.

    Raises:
        AirflowFailException: the run has failed or was cancelled.
    """

    template_fields: Sequence[str] = ("run_id", "storage")

    def __init__(self, *, run_id: str, fail_fast: bool = True, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.run_id = run_id
        self.fail_fast = fail_fast

    def poke(self, context: Context) -> PokeReturnValue:
        from verl_airflow._runs import failure_of, find_run, holds, result_of
        from verl_workflow.workflow import RunStatus

        state = find_run(self.storage_uri, self.run_id)
        if state is None or not holds(state, self._until):
            return PokeReturnValue(is_done=False)
        if state.status is RunStatus.SUCCEEDED:
            return PokeReturnValue(is_done=True, xcom_value=result_of(state, self.storage_uri))
        if state.status is RunStatus.CANCELLED:
            raise AirflowFailException(f"the run {self.run_id} was cancelled")
        failure = failure_of(state.error or {})
        raise AirflowFailException(f"the run {self.run_id} failed ({failure.kind.value}): {failure.message}")

    def trigger(self) -> BaseTrigger:
        return VerlRunTrigger(
            storage=self.storage_uri, run_id=self.run_id, poll_interval=self.poke_interval, until=self._until
        )

    def execute_complete(self, context: Context, event: Mapping[str, Any]) -> Any:
        """Look again, now that the trigger has seen the end."""
        ended = Ended.from_event(event)
        if ended.ending is not Ending.LEFT:
            raise AirflowException(f"the run {self.run_id}: {ended.message}")
        return self.execute(context)

    @property
    def _until(self) -> str:
        return "ended" if self.fail_fast else "final"


class ModelAliasSensor(_StorageSensor):
    """Waits until an alias of a model is set, or points to a version, or has moved.

    Args:
        model, alias: of the registry (templated). Default alias: ``champion``.
        version: the version to wait for (templated); None: any.
        after: number of a move; only later ones count. 0, the default: any.
        storage, deferrable, kwargs: as for `VerlRunSensor`.

    Returns (XCom):
        ``model``, ``alias``, ``version``, ``number`` of the move.
    """

    template_fields: Sequence[str] = ("model", "alias", "version", "storage")

    def __init__(
        self, *, model: str, alias: str = "champion", version: str | None = None, after: int = 0, **kwargs: Any
    ) -> None:
        super().__init__(**kwargs)
        self.model = model
        self.alias = alias
        self.version = version
        self.after = after

    def poke(self, context: Context) -> PokeReturnValue:
        from verl_airflow._models import moved_to

        found = moved_to(self.storage_uri, self.model, self.alias, version=self.version, after=self.after)
        return PokeReturnValue(is_done=found is not None, xcom_value=found)

    def trigger(self) -> BaseTrigger:
        return ModelAliasTrigger(
            storage=self.storage_uri,
            model=self.model,
            alias=self.alias,
            version=self.version,
            after=self.after,
            poll_interval=self.poke_interval,
        )

    def execute_complete(self, context: Context, event: Mapping[str, Any]) -> Any:
        """What the trigger has seen."""
        if "error" in event:
            raise AirflowException(event["error"])
        return dict(event)
