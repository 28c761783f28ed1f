"""Plans for real Ray workers: module-level functions, so that actors and other processes find them by name."""

from __future__ import annotations

import os
import signal
import sys
import time
import types
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from verl_workflow.errors import ErrorCode, UserError
from verl_workflow.workflow import Plan, RetryPolicy, Step, StepContext

QUICK = RetryPolicy(attempts=3, backoff_s=0.1)


def mark(context: StepContext, folder: str) -> None:
    """Leaves a file with the worker's process number."""
    name = f"{context.step}.{context.epoch}.{context.attempt}"
    path = Path(folder) / f".{name}"
    path.write_text(str(os.getpid()))
    path.rename(Path(folder) / name)


class Marked:
    def __init__(self, folder: str, *, die_at: int = 0, wait_for: str = "") -> None:
        self.folder = folder
        self.die_at = die_at
        self.wait_for = wait_for

    def __call__(self, context: StepContext) -> int:
        mark(context, self.folder)
        if context.attempt == self.die_at:
            os.kill(os.getpid(), signal.SIGKILL)
        while self.wait_for and not (Path(self.folder) / self.wait_for).exists():
            time.sleep(0.05)
        return 1 + sum(context.inputs.values())


class Refused(UserError):
    """An error of the user's own class."""

    def __init__(self, rows: int) -> None:
        super().__init__(ErrorCode.DATA_INVALID, f"{rows} rows are wrong", value=rows)
        self.rows = rows

    def __reduce__(self) -> tuple[Any, ...]:
        return Refused, (self.rows,)


def refuse(context: StepContext) -> None:
    raise Refused(7)


def chain(definition: Mapping[str, Any], store_uri: str, run_id: str) -> Plan:
    """first -> gate -> last; `gate` waits for the file ``go``."""
    folder = str(definition["folder"])
    return Plan(
        steps=(
            Step(name="first", call=Marked(folder), retry=QUICK),
            Step(name="gate", call=Marked(folder, wait_for="go"), after=("first",), retry=QUICK),
            Step(name="last", call=Marked(folder), after=("gate",), retry=QUICK),
        )
    )


def broken(definition: Mapping[str, Any], store_uri: str, run_id: str) -> Plan:
    raise UserError(ErrorCode.SPEC_INVALID, "this plan cannot be made", where="pipeline.yaml:3:1")


def in_a_module_of_the_worker(name: str, **members: Any) -> dict[str, Any]:
    """Classes of a module that only the calling process has, as of a file that was loaded by its path."""
    module = types.ModuleType(name)
    sys.modules[name] = module
    for member in members.values():
        member.__module__ = name
        member.__qualname__ = member.__name__
        setattr(module, member.__name__, member)
    return members
