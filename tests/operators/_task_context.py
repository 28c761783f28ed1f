"""What Airflow gives to a task, as far as operators look at it, and the walk from a deferral to its end."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from airflow.sdk.exceptions import TaskDeferred


@dataclass
class TaskStates:
    """Airflow's task state store: it outlives tries and clears."""

    values: dict[str, Any] = field(default_factory=dict)

    def get(self, key: str, default: Any = None) -> Any:
        return self.values.get(key, default)

    def set(self, key: str, value: Any, *, retention: Any = None) -> None:
        assert value is not None
        self.values[key] = value

    def delete(self, key: str) -> None:
        self.values.pop(key, None)


@dataclass
class Ti:
    """A task instance in one of its tries."""

    dag_id: str = "nightly"
    run_id: str = "scheduled__2026-12-01T02:00:00+00:00"
    task_id: str = "train"
    map_index: int | None = -1
    try_number: int = 1
    pushed: dict[str, Any] = field(default_factory=dict)
    stats_tags: dict[str, str] = field(default_factory=dict)

    def xcom_push(self, key: str, value: Any) -> None:
        self.pushed[key] = value


@dataclass
class Task:
    """A task instance over its tries. `make` builds the operator, anew in each process as Airflow does."""

    make: Callable[[], Any]
    states: TaskStates = field(default_factory=TaskStates)
    ti: Ti = field(default_factory=Ti)

    def context(self) -> Any:
        return {"ti": self.ti, "task_state_store": self.states}

    def start(self) -> TaskDeferred:
        """Run a try up to its deferral."""
        try:
            result = self.make().execute(self.context())
        except TaskDeferred as deferred:
            return deferred
        raise AssertionError(f"it did not defer, and returned {result}")

    def resume(self, deferred: TaskDeferred) -> TaskDeferred:
        """Wait in the triggerer and go on up to the next deferral."""
        event = wait(deferred)
        try:
            result = getattr(self.make(), deferred.method_name)(self.context(), event=event)
        except TaskDeferred as further:
            return further
        raise AssertionError(f"it did not defer again, and returned {result}")

    def finish(self, deferred: TaskDeferred) -> Any:
        """Wait in the triggerer and go on in a new process, until the try returns or raises."""
        while True:
            event = wait(deferred)
            try:
                return getattr(self.make(), deferred.method_name)(self.context(), event=event)
            except TaskDeferred as further:
                deferred = further

    def run(self) -> Any:
        """A whole try."""
        try:
            return self.make().execute(self.context())
        except TaskDeferred as deferred:
            return self.finish(deferred)

    def next_try(self) -> Task:
        """The task after a retry or a clear."""
        self.ti = Ti(task_id=self.ti.task_id, try_number=self.ti.try_number + 1)
        return self


def rebuilt(trigger: Any) -> Any:
    """The trigger as another process builds it, from what Airflow keeps in its database."""
    from airflow.sdk._shared.module_loading import import_string
    from airflow.sdk.serde import deserialize, serialize

    path, kwargs = trigger.serialize()
    return import_string(path)(**deserialize(serialize(kwargs)))


def wait(deferred: TaskDeferred, *, timeout: float = 20.0) -> Any:
    """The event that ends a deferral."""

    async def first() -> Any:
        async for event in rebuilt(deferred.trigger).run():
            return event.payload
        raise AssertionError("the trigger ended without an event")

    return asyncio.run(asyncio.wait_for(first(), timeout))
