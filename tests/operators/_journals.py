"""Runs made by the workflow package itself, in this process, over real storage: what a cluster would have left."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from verl_workflow.storage import Store
from verl_workflow.workflow import Driver, InlineLauncher, Plan, Step, StepContext, create_run, read_run, this_process
from verl_workflow.workflow._journal import Journal
from verl_workflow.workflow._records import Claimed

Call = Callable[[StepContext], Any]
KINDS = {"train": "verl", "evaluate": "evaluate", "promote": "promote"}
GOOD: Mapping[str, Call] = {
    "train": lambda ctx: {"step": 40, "reward": {"first": 0.05, "last": 0.93, "best": 0.95}},
    "evaluate": lambda ctx: {"candidate": {"score": 0.9, "acc": 0.85, "artifact": {}}, "champion": None, "rows": 20},
    "promote": lambda ctx: {"promoted": True, "reason": "holds", "version": "v0001", "model": {"path": "/m/v0001"}},
}


def create(storage: str, run_id: str, stages: Mapping[str, Call] = GOOD) -> None:
    described = [{"name": name, "kind": KINDS.get(name, "python")} for name in stages]
    definition = {"pipeline": {"name": "demo", "stages": described}, "artifacts": "/nowhere", "source": ""}
    create_run(Store(storage), run_id, definition)


def drive(storage: str, run_id: str, stages: Mapping[str, Call] = GOOD) -> None:
    """Drive a created run to its end."""
    names = list(stages)
    steps = tuple(
        Step(name=name, call=call, after=tuple(names[index - 1 : index] if index else ()))
        for index, (name, call) in enumerate(stages.items())
    )
    Driver(store=Store(storage), run_id=run_id, plan=Plan(steps=steps), launcher=InlineLauncher()).run()


def finish(storage: str, run_id: str, stages: Mapping[str, Call] = GOOD) -> None:
    create(storage, run_id, stages)
    drive(storage, run_id, stages)


def claim(storage: str, run_id: str) -> None:
    """Create a run, and take it as a driver that does nothing for its lease's time."""
    create(storage, run_id)
    store = Store(storage)
    journal = Journal(store, read_run(store, run_id).key)
    journal.read()
    journal.claim(Claimed(owner=this_process(), steps=list(GOOD)))


def failing(error: Exception) -> Mapping[str, Call]:
    """The stages of a run that fails by this error."""

    def fail(ctx: StepContext) -> Any:
        raise error

    return {"train": fail}
