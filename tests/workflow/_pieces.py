"""Steps and storages that the tests of durable execution share."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from verl_workflow.storage import Store
from verl_workflow.workflow import Driver, InlineLauncher, Plan, RetryPolicy, RunState, Step, StepContext
from verl_workflow.workflow._definition import run_key

IMPATIENT = RetryPolicy(attempts=3, backoff_s=0.0)


class Crash(BaseException):
    """Stands for the end of the process: no handler of the driver may take it for an error of the storage."""


class CrashingStore(Store):
    """Dies at its n-th write, before or after that write is done, and writes nothing any more afterwards."""

    def __init__(self, uri: str, *, at: int, after: bool) -> None:
        super().__init__(uri)
        self.writes = 0
        self._at = at
        self._after = after
        self._lock = threading.Lock()

    def create(self, key: str, data: bytes) -> bool:
        return self._write(lambda: Store.create(self, key, data))

    def put(self, key: str, data: bytes) -> None:
        self._write(lambda: Store.put(self, key, data))

    def _write(self, write: Callable[[], Any]) -> Any:
        with self._lock:
            self.writes += 1
            if self.writes > self._at or (self.writes == self._at and not self._after):
                raise Crash
            done = write()
            if self.writes == self._at:
                raise Crash
            return done


class DyingStore(Store):
    """Dies at its n-th deletion, before or after it is done."""

    def __init__(self, uri: str, *, at: int, after: bool) -> None:
        super().__init__(uri)
        self._left, self._after = at, after

    def delete(self, key: str) -> None:
        self._left -= 1
        if self._left == 0 and not self._after:
            raise Crash
        super().delete(key)
        if self._left == 0:
            raise Crash


def described(root: str = "f") -> dict[str, Any]:
    """What a definition says of a workflow, whose graph nobody is going to read."""
    graph = "runs/r/0123456789abcdef/graphs/a.pkl"
    return {"workflow": {"graph": graph, "sha256": "0" * 64, "root": root, "metadata": {}}}


def drive(store: Store, run_id: str, plan: Plan, **options: Any) -> RunState:
    """Run a plan in threads, with patience for other drivers cut to a twentieth of a second."""
    return Driver(
        store, run_id, plan, InlineLauncher(), **{"lease_s": 0.05, "heartbeat_s": 60.0, "poll_s": 0.02, **options}
    ).run()


def journal(store: Store, run_id: str) -> list[dict[str, Any]]:
    """All events in order, each with the number, epoch and time of its entry."""
    entries = [json.loads(store.get(key) or b"") for key in store.list(f"{run_key(store, run_id).folder}/journal")]
    return [{**entry, **event} for entry in entries for event in entry.pop("events")]


def of_kind(records: Iterable[dict[str, Any]], kind: str) -> list[dict[str, Any]]:
    return [record for record in records if record["kind"] == kind]


class Marking:
    """A step's function that leaves a file for each execution and returns the sum of its inputs and `plus`."""

    def __init__(self, folder: Path, plus: int = 1) -> None:
        self._folder = folder
        self._plus = plus

    def __call__(self, context: StepContext) -> int:
        (self._folder / f"{context.step}.{context.epoch}.{context.attempt}").touch()
        return self._plus + sum(context.inputs.values())


def executions(folder: Path, step: str) -> list[tuple[int, int]]:
    """(epoch, attempt) of each execution of a Marking step."""
    found = (path.name.split(".") for path in folder.glob(f"{step}.*"))
    return sorted((int(epoch), int(attempt)) for _, epoch, attempt in found)


def diamond(folder: Path) -> Plan:
    """a -> (b, c) -> d; the value of d is 10."""
    steps = (
        Step(name="a", call=Marking(folder, 1), retry=IMPATIENT),
        Step(name="b", call=Marking(folder, 2), after=("a",), retry=IMPATIENT),
        Step(name="c", call=Marking(folder, 3), after=("a",), retry=IMPATIENT),
        Step(name="d", call=Marking(folder, 3), after=("b", "c"), retry=IMPATIENT),
    )
    return Plan(steps=steps)
