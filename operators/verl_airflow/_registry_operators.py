"""Tasks that move an alias of the registry: forward, and back. They need no Ray."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from airflow.sdk import Asset, BaseOperator

from verl_airflow._connection import DEFAULT_CONNECTION
from verl_airflow._final_errors import final_errors
from verl_airflow._generations import TaskIdentity
from verl_airflow._storage import storage_uri
from verl_airflow.hook import RayJobsHook

if TYPE_CHECKING:
    from airflow.sdk import Context

_SCHEME = "verl-model"
# In Airflow's database: never to be renamed.
_SEEN = "verl_workflow_alias_moves"


def model_asset(model: str) -> Asset:
    """The asset that stands for a model: a DAG that is scheduled on it runs when the model is promoted."""
    return Asset(name=f"{_SCHEME}://{model}", uri=f"{_SCHEME}://{model}")


class _AliasOperator(BaseOperator):
    """Moves an alias, and tells those who wait for the model's asset; `moved` in the event's extra says if it did."""

    def __init__(
        self,
        *,
        model: str,
        alias: str = "champion",
        storage: str | None = None,
        conn_id: str = DEFAULT_CONNECTION,
        outlets: Sequence[Asset] | None = None,
        **kwargs: Any,
    ) -> None:
        if outlets is None:
            # Airflow has to know assets before a run gives names their values.
            outlets = [] if "{" in str(model) else [model_asset(model)]
        super().__init__(outlets=outlets, **kwargs)
        self.model = model
        self.alias = alias
        self.storage = storage
        self.conn_id = conn_id

    def execute(self, context: Context) -> dict[str, Any]:
        with final_errors():
            moved = self.move(context, storage_uri(self.storage, RayJobsHook(self.conn_id), self.task_id))
        self.log.info("%s", moved)
        for outlet in self.outlets:
            if isinstance(outlet, Asset):
                context["outlet_events"][outlet].extra = moved
        return moved

    def move(self, context: Context, storage: str) -> dict[str, Any]:
        raise NotImplementedError


class VerlPromoteOperator(_AliasOperator):
    """Points an alias of a model to a version, once however often the task is tried.

    Args:
        model, version: of the registry (templated); a version such as ``v0003``, or another alias.
        alias: default ``champion`` (templated).
        expected: the version that the alias has to point to before, so that nobody's move is overwritten (templated).
        storage: URI (templated). Default: that of the connection.
        outlets: by default the model's asset, see `model_asset`, unless `model` is a template.

    Returns (XCom, and `extra` of the asset's event):
        ``model``, ``alias``, ``version``, ``number`` of the move, ``previous`` version, and whether it has ``moved``.

    Raises:
        AirflowFailException: there is no such model or version, or the alias points elsewhere than expected.
    """

    template_fields: Sequence[str] = ("model", "version", "alias", "expected", "storage")

    def __init__(self, *, version: str, expected: str | None = None, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.version = version
        self.expected = expected

    def move(self, context: Context, storage: str) -> dict[str, Any]:
        from verl_airflow._models import promote

        identity = TaskIdentity.of(context)
        by = (f"airflow:{identity.name}", self.task_id)
        return promote(storage, self.model, self.version, self.alias, by=by, expected=self.expected)


class VerlRollbackOperator(_AliasOperator):
    """Points an alias of a model back.

    Args:
        model, alias, storage, outlets: as for `VerlPromoteOperator`.
        to: the version to go back to (templated). Default: the one before the present one.
        files: folder of the registry's files where it is mounted on Airflow's machines: they are verified then.
            Default: the storage itself, if that is a folder.

    Returns (XCom, and `extra` of the asset's event):
        As `VerlPromoteOperator`.
    """

    template_fields: Sequence[str] = ("model", "to", "alias", "storage", "files")

    def __init__(self, *, to: str | None = None, files: str | None = None, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.to = to
        self.files = files

    def move(self, context: Context, storage: str) -> dict[str, Any]:
        from verl_airflow._models import moves_of, roll_back

        store = context["task_state_store"]
        seen = store.get(_SEEN)
        if not isinstance(seen, int):
            # A try that is lost after its move must not make the next one go back once more.
            seen = moves_of(storage, self.model, self.alias)
            store.set(_SEEN, seen)
        try:
            return roll_back(storage, self.model, self.alias, to=self.to, files=self.files, seen=seen)
        finally:
            # Whoever clears the task decides anew; a process that is killed does not get here.
            store.delete(_SEEN)
