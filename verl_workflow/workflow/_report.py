"""What a running attempt says of itself."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from verl_workflow.errors import VerlWorkflowError
from verl_workflow.storage import Store
from verl_workflow.workflow._progress import beats_each, progress_key, read_progress

if TYPE_CHECKING:
    from verl_workflow.workflow._attempt import Call

_INTERVAL_S = 1.0


class Report:
    """Writes an attempt's progress at most once a second; the last facts given are written in the end."""

    def __init__(self, call: Call) -> None:
        self._call = call
        self._lock = threading.Lock()
        self._pending: dict[str, Any] | None = None
        self._written_at = float("-inf")
        self._timer: threading.Timer | None = None
        self._store: Store = call.store
        self._before: Mapping[str, Any] | None = None
        self._details: Mapping[str, Any] = {}
        self._looked = False
        self._closed = False
        self._interval_s = beats_each(call.heartbeat_s, _INTERVAL_S)

    def earlier(self) -> Mapping[str, Any] | None:
        """What the last report before this attempt's said."""
        with self._lock:
            self._look()
            return self._before

    def _look(self) -> None:
        if self._looked:
            return
        self._looked = True
        found = read_progress(self._store, self._call.run, self._call.step)
        self._before = found.facts if found is not None and found.attempt < self._call.attempt else None

    def __call__(self, facts: Mapping[str, Any]) -> None:
        with self._lock:
            # Whoever gives what JSON cannot hold is told at once, and what is written later is what was given now.
            given = json.loads(json.dumps(dict(facts), default=str))
            # A mere sign of life does not make the details before it forgotten.
            self._pending = given or self._pending or given
            due = self._written_at + self._interval_s - time.monotonic()
            if due <= 0:
                self._write()
            else:
                self._write_in(due)

    def close(self) -> None:
        self._closed = True
        if self._timer is not None:
            self._timer.cancel()
        self._flush()

    def _write_in(self, seconds: float) -> None:
        if self._timer is None and not self._closed:
            self._timer = threading.Timer(seconds, self._flush)
            self._timer.daemon = True
            self._timer.start()

    def _flush(self) -> None:
        with self._lock:
            self._timer = None
            self._write()

    def _write(self) -> None:
        if self._pending is None:
            return
        self._look()
        facts, self._pending = self._pending, None
        self._written_at = time.monotonic()
        call = self._call
        stored = {"attempt": call.attempt, "epoch": call.epoch, "time": time.time(), "facts": facts}
        self._details = facts or self._details
        if not facts and (before := self._details or self._before):
            stored["before"] = before
        try:
            self._store.put(progress_key(call.run, call.step), json.dumps(stored).encode())
        except VerlWorkflowError:
            # A storage in trouble is met by the driver, which does say so. But a time limit runs from the first report.
            self._pending = facts
            self._write_in(self._interval_s)
