"""Metrics to TensorBoard's event files, written without torch."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from verl_workflow.trackers._facts import Facts
from verl_workflow.trackers._sink import Point


class TensorboardSink:
    """A folder of event files; each sender adds one."""

    def __init__(self, tracker: Mapping[str, Any], facts: Facts, folder: Path) -> None:
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        place = Path(tracker["folder"]) / facts.run_id / facts.stage if tracker.get("folder") else folder
        place.mkdir(parents=True, exist_ok=True)
        self._writer = EventFileWriter(str(place))

    def last_step(self) -> int | None:
        return None

    def send(self, points: Sequence[Point]) -> None:
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary

        now = time.time()
        for point in points:
            values = [Summary.Value(tag=key, simple_value=value) for key, value in point.numbers.items()]
            self._writer.add_event(Event(wall_time=now, step=point.step, summary=Summary(value=values)))
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()
