"""Sends a stage's metrics to one tracker: each step once, in order, whatever happens to sender and tracker.

A step that is trained again after a resume is not sent again: the tracker keeps what was trained first.
"""

from __future__ import annotations

import fcntl
import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from verl_workflow.trackers._facts import FOLDER, Facts
from verl_workflow.trackers._sink import Point, Sink, finite, open_sink

# Few enough that what a killed sender repeats is little.
_AT_ONCE = 10

Open = Callable[[Mapping[str, Any], Facts, Path], Sink]


class Sender:
    """For one tracker of a stage. `flush` may be called again after it raised.

    Args:
        stage_dir: ``<artifacts>/runs/<run>/stages/<stage>``.
        number: of the tracker in the facts, from 0.
    """

    def __init__(self, stage_dir: Path, facts: Facts, number: int, *, open_with: Open = open_sink) -> None:
        self._stage_dir = stage_dir
        self._facts = facts
        self._tracker = facts.trackers[number]
        self._open = open_with
        self.name = f"{number}-{self._tracker['kind']}"
        self._cursor = stage_dir / FOLDER / f"{self.name}.json"
        self._sink: Sink | None = None
        self._sent = self._recorded()

    @property
    def sent(self) -> int:
        """The last step that the tracker has; 0 for none."""
        return self._sent

    @contextmanager
    def alone(self) -> Iterator[bool]:
        """Whether nobody else sends to this tracker meanwhile; while it is held, nobody else does."""
        self._cursor.parent.mkdir(parents=True, exist_ok=True)
        with self._cursor.with_suffix(".lock").open("w") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                yield False
                return
            self._sent = self._recorded()
            yield True

    def pending(self) -> list[Point]:
        """Steps that the tracker has not, in order."""
        from verl_workflow.training import attempt_rows

        points: dict[int, Point] = {}
        for rows in attempt_rows(self._stage_dir):
            for row in rows:
                known = points.get(row.step)
                numbers = finite(row.data)
                if row.step > self._sent and numbers:
                    # Of a validation and a training at one step there are two rows in an attempt.
                    points[row.step] = Point(step=row.step, numbers={**numbers, **(known.numbers if known else {})})
        return [points[step] for step in sorted(points)]

    def flush(self) -> int:
        """Send what is pending; how many steps. Raises whatever the tracker's client raises."""
        count = 0
        while points := self.pending()[:_AT_ONCE]:
            sink = self._opened()
            points = [point for point in points if point.step > self._sent]
            if points:
                sink.send(points)
                self._record(points[-1].step)
                count += len(points)
        return count

    def drop(self) -> None:
        """Forget the connection, so that the next flush makes another."""
        self._sink = None

    def close(self) -> None:
        if self._sink is not None:
            self._sink.close()
            self._sink = None

    def _opened(self) -> Sink:
        if self._sink is None:
            self._sink = self._open(self._tracker, self._facts, self._stage_dir / FOLDER / self.name)
            # What was sent by one that was killed before it wrote so.
            held = self._sink.last_step()
            if held is not None and held > self._sent:
                self._record(held)
        return self._sink

    def _recorded(self) -> int:
        try:
            return int(json.loads(self._cursor.read_text(encoding="utf-8"))["sent"])
        except (FileNotFoundError, ValueError, KeyError, TypeError):
            return 0

    def _record(self, step: int) -> None:
        self._sent = step
        partial = self._cursor.with_suffix(".partial")
        partial.write_text(json.dumps({"sent": step}), encoding="utf-8")
        partial.replace(self._cursor)
