"""Runs made by the workflow package itself, in this process, over real storage."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from typer.testing import Result

from verl_workflow.storage import Store
from verl_workflow.workflow import Driver, InlineLauncher, Plan, RetryPolicy, Step, StepContext, create_run

Call = Callable[[StepContext], Any]
Invoke = Callable[..., Result]
KINDS = {"prepare": "data", "train": "verl", "train-2": "verl", "evaluate": "evaluate", "promote": "promote"}


class Runs:
    """A storage below `folder`, and the runs a test puts into it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.path = folder / "storage"
        self.store = Store(str(self.path))

    def create(self, run_id: str, stages: Mapping[str, Call], *, source: str = "") -> None:
        described = [{"name": name, "kind": KINDS.get(name, "python")} for name in stages if name != "model"]
        pipeline = {"name": "demo", "stages": described}
        create_run(self.store, run_id, {"pipeline": pipeline, "artifacts": str(self.path), "source": source})

    def drive(self, run_id: str, stages: Mapping[str, Call], *, attempts: int = 1) -> None:
        """Drive a created run to its end, one stage after the other."""
        names = list(stages)
        steps = tuple(
            Step(
                name=name,
                call=call,
                after=tuple(names[index - 1 : index] if index else ()),
                retry=RetryPolicy(attempts=attempts, backoff_s=0.0),
            )
            for index, (name, call) in enumerate(stages.items())
        )
        Driver(store=self.store, run_id=run_id, plan=Plan(steps=steps), launcher=InlineLauncher()).run()

    def finish(self, run_id: str, stages: Mapping[str, Call], *, attempts: int = 1, source: str = "") -> None:
        """Create a run and drive it to its end."""
        self.create(run_id, stages, source=source)
        self.drive(run_id, stages, attempts=attempts)

    def drive_in_background(self, run_id: str, stages: Mapping[str, Call]) -> threading.Thread:
        thread = threading.Thread(target=self.drive, args=(run_id, stages), daemon=True)
        thread.start()
        return thread

    def log(self, run_id: str, stage: str, attempt: int) -> Path:
        """The log file of an attempt, its folder made."""
        path = self.path / "runs" / run_id / "stages" / stage / "attempts" / f"{attempt:03d}" / "log.txt"
        path.parent.mkdir(parents=True, exist_ok=True)
        return path
