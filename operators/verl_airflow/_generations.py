"""What a task keeps in Airflow's task state store: which submission is the newest, and which run is meant.

The store outlives tries and clears. Ray takes an id once only, so each submission of a task instance is a generation
with an id of its own, which is written down before the job is submitted: a worker that dies in between leaves an id
that Ray does not know, never a job that nobody knows.
"""

from __future__ import annotations

import hashlib
import json
import re
import secrets
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import Any, Protocol

# A task may be cleared when its records would have been tidied away.
from airflow.sdk.execution_time.context import NEVER_EXPIRE

# Never to be renamed: running tasks have them in Airflow's database.
_GENERATION, _ATTACHED, _RUN = "verl_workflow_generation", "verl_workflow_attached", "verl_workflow_run"
_LONGEST_PART = 50


class StateStore(Protocol):
    """Airflow's ``TaskStateStoreAccessor`` as far as it is used."""

    def get(self, key: str, default: Any = None) -> Any: ...

    def set(self, key: str, value: Any, *, retention: timedelta | None = None) -> None: ...

    def delete(self, key: str) -> None: ...


@dataclass(frozen=True, kw_only=True)
class TaskIdentity:
    """A task instance as it is known over all of its tries. `map_index` is -1 for a task that is not mapped."""

    dag_id: str
    run_id: str
    task_id: str
    map_index: int = -1

    @classmethod
    def of(cls, context: Mapping[str, Any]) -> TaskIdentity:
        """Who runs in this context. Its `ti.id` is of no use: it changes with every try."""
        ti = context["ti"]
        mapped = ti.map_index if ti.map_index is not None else -1
        return cls(dag_id=ti.dag_id, run_id=ti.run_id, task_id=ti.task_id, map_index=mapped)

    @property
    def name(self) -> str:
        """A readable name that no other task instance has: letters, digits, ``-`` and ``_``."""
        digest = hashlib.sha256(json.dumps(list(asdict(self).values())).encode()).hexdigest()
        return "-".join([*map(_plain, (self.dag_id, self.run_id, self.task_id)), digest[:12]])


@dataclass(frozen=True, kw_only=True)
class Generation:
    """One submission.

    Attributes:
        number: 1, 2, ...; never given twice. job_id: Ray's submission id.
        token: random, kept in the job's metadata too. try_number: the try that submitted it.
    """

    number: int
    job_id: str
    token: str
    try_number: int


def current_generation(store: StateStore) -> Generation | None:
    """The newest one; None before the first."""
    found = store.get(_GENERATION)
    return Generation(**found) if isinstance(found, Mapping) else None


def next_generation(store: StateStore, identity: TaskIdentity, try_number: int) -> Generation:
    """A new one, on record when this returns."""
    before = current_generation(store)
    number = before.number + 1 if before is not None else 1
    found = Generation(
        number=number, job_id=f"{identity.name}-g{number}", token=secrets.token_hex(8), try_number=try_number
    )
    store.set(_GENERATION, asdict(found), retention=NEVER_EXPIRE)
    return found


@dataclass(frozen=True, kw_only=True)
class Attached:
    """That a try has found something to wait for, which it has not submitted.

    Attributes:
        at: Unix time. cleared: whether a user's kill of the try before was seen to be meant for it.
    """

    try_number: int
    at: float
    cleared: bool = False

    @classmethod
    def read(cls, store: StateStore) -> Attached | None:
        found = store.get(_ATTACHED)
        return cls(**found) if isinstance(found, Mapping) else None

    def write(self, store: StateStore) -> None:
        store.set(_ATTACHED, asdict(self))


@dataclass(frozen=True, kw_only=True)
class RunRecord:
    """Which of its runs a task is at.

    Attributes:
        number: 1, 2, ...
        finished: whether the task has succeeded with it, so that it wants the next when it is cleared.
    """

    number: int = 1
    finished: bool = False

    @classmethod
    def read(cls, store: StateStore) -> RunRecord:
        found = store.get(_RUN)
        return cls(**found) if isinstance(found, Mapping) else cls()

    def write(self, store: StateStore) -> None:
        store.set(_RUN, asdict(self), retention=NEVER_EXPIRE)

    def run_id(self, base: str) -> str:
        """The id of the run: `base`, then ``base.2`` and so on."""
        return base if self.number == 1 else f"{base}.{self.number}"


def _plain(text: str) -> str:
    return re.sub(r"[^A-Za-z0-9_]+", "-", text).strip("-")[:_LONGEST_PART]
