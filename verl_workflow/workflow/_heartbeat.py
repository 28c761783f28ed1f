"""A driver's sign of life, and how others judge it."""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from types import TracebackType
from typing import Any

from verl_workflow.errors import VerlWorkflowError
from verl_workflow.storage import Store
from verl_workflow.stored_json import is_number, parse_json
from verl_workflow.workflow._names import RunKey
from verl_workflow.workflow._owner import is_dead

# A driver is given up when its heartbeat was seen unchanged for this long.
LEASE_S = 15.0
INTERVAL_S = 2.0
_AT_A_TIME = 64
_log = logging.getLogger(__name__)


def heartbeat_key(run: RunKey) -> str:
    return f"{run.folder}/heartbeat.json"


def read_heartbeat(store: Store, run: RunKey) -> dict[str, Any] | None:
    """The last heartbeat, or None when there is none that can be read: it is a hint, never the truth."""
    data = store.get(heartbeat_key(run))
    try:
        found = parse_json(data) if data is not None else None
    except ValueError:
        return None
    if not isinstance(found, dict) or not is_number(found.get("epoch")) or not is_number(found.get("time", 0.0)):
        return None
    return found


class Heartbeat:
    """Overwrites the run's heartbeat from a thread of its own while the context is open.

    A failed write is tried again at the next beat: what a driver may commit is decided by the journal alone.
    """

    def __init__(
        self, store: Store, run: RunKey, *, epoch: int, owner: Mapping[str, Any], interval_s: float = INTERVAL_S
    ) -> None:
        self._store = store
        self._run = run
        self._facts = {"epoch": epoch, "owner": dict(owner)}
        self._interval = interval_s
        self._count = 0
        self._lock = threading.Lock()

    def __enter__(self) -> Heartbeat:
        self._write(released=False)
        _PULSE.add(self, self._interval)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        _PULSE.remove(self)
        # Says that nobody needs to wait for this driver any more.
        with self._lock:
            self._write(released=True)

    def beat(self) -> None:
        """Write another sign, unless the last one has been written."""
        with self._lock:
            if _PULSE.has(self):
                self._write(released=False)

    def _write(self, *, released: bool) -> None:
        try:
            found = read_heartbeat(self._store, self._run) or {}
            if found.get("epoch", 0) > self._facts["epoch"]:
                return
            self._count += 1
            facts = {**self._facts, "time": time.time(), "n": self._count, "released": released}
            self._store.put(heartbeat_key(self._run), json.dumps(facts).encode())
        except VerlWorkflowError as error:
            _log.warning("heartbeat of run %s not written: %s", self._run.run_id, error)


class _Pulse:
    """Lets all heartbeats of a process beat: a host may drive a thousand runs, and each beat asks the storage twice."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._due: dict[Heartbeat, tuple[float, float]] = {}
        self._beating: set[Heartbeat] = set()
        self._thread: threading.Thread | None = None
        self._hands = ThreadPoolExecutor(_AT_A_TIME, thread_name_prefix="heartbeats")

    def add(self, heartbeat: Heartbeat, interval_s: float) -> None:
        with self._changed:
            self._due[heartbeat] = time.monotonic() + interval_s, interval_s
            if self._thread is None or not self._thread.is_alive():
                self._thread = threading.Thread(target=self._run, name="heartbeats", daemon=True)
                self._thread.start()
            self._changed.notify()

    def remove(self, heartbeat: Heartbeat) -> None:
        with self._changed:
            del self._due[heartbeat]

    def has(self, heartbeat: Heartbeat) -> bool:
        with self._changed:
            return heartbeat in self._due

    def _run(self) -> None:
        while True:
            with self._changed:
                now = time.monotonic()
                due = [each for each, (at, _) in self._due.items() if at <= now]
                if not due:
                    self._changed.wait(max(min((at for at, _ in self._due.values()), default=now + 60.0) - now, 0.0))
                    continue
                for each in due:
                    interval = self._due[each][1]
                    self._due[each] = now + interval, interval
                # One that the storage keeps waiting is not asked for another.
                due = [each for each in due if each not in self._beating]
                self._beating.update(due)
            for each in due:
                self._hands.submit(self._beat, each)

    def _beat(self, heartbeat: Heartbeat) -> None:
        try:
            heartbeat.beat()
        except Exception:  # noqa: BLE001 - the other hearts must not stop for it
            _log.exception("a heartbeat was not written")
        finally:
            with self._changed:
                self._beating.discard(heartbeat)


_PULSE = _Pulse()


def known_gone(heartbeat: Mapping[str, Any] | None, owner: Mapping[str, Any], epoch: int) -> bool:
    """Whether the owner of `epoch` is gone for certain: it said so, or its process on this host is dead."""
    current = heartbeat is not None and heartbeat.get("epoch") == epoch
    return is_dead(owner) or bool(current and heartbeat is not None and heartbeat.get("released"))


def seen_unchanged(store: Store, run: RunKey, lease_s: float) -> bool:
    """Watch the heartbeat for `lease_s` on this process's own monotonic clock; False as soon as it changes."""
    first = store.get(heartbeat_key(run))
    deadline = time.monotonic() + lease_s
    while True:
        over = time.monotonic() >= deadline
        # Looked at once more after the time is over: this process may have been paused itself.
        if store.get(heartbeat_key(run)) != first:
            return False
        if over:
            return True
        time.sleep(min(0.5, max(lease_s / 10, 0.01)))
