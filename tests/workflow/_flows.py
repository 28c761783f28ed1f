"""What tests of workflows on a real cluster share: steps, marks of their executions, and the host's end."""

from __future__ import annotations

import contextlib
import os
import signal
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ray

from verl_workflow import workflow
from verl_workflow.workflow._client import NAMESPACE


class Refused(Exception):
    """An error of the user's own class."""


class AlsoRefused(Refused):
    pass


def mark(folder: Path, name: str) -> int:
    """Leave a file for this execution, with the process number; says how many there are of this name."""
    number = uuid.uuid4().hex
    # Whoever sees it may read it at once.
    (folder / f".{number}").write_text(str(os.getpid()))
    (folder / f".{number}").rename(folder / f"{name}.{number}")
    return executions(folder, name)


def executions(folder: Path, name: str) -> int:
    return len(list(folder.glob(f"{name}.*")))


def until(condition: Callable[[], Any], what: str, seconds: float = 60.0) -> Any:
    """Wait for a condition, and give what it gave."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        found = condition()
        if found:
            return found
        time.sleep(0.02)
    raise AssertionError(f"in {seconds:g} s there was no {what}")


def started(folder: Path, name: str) -> None:
    """Wait until an execution has begun."""
    until(lambda: executions(folder, name), f"execution of {name}")


def waits_for(folder: Path, name: str, value: Any = None) -> Any:
    """In a step: leave a mark, and wait until the test says ``go``."""
    mark(folder, name)
    while not (folder / "go").exists():
        time.sleep(0.02)
    return value


def attempts_of(workflow_id: str, task_id: str) -> list[tuple[int, str]]:
    return [(each["number"], each["status"]) for each in workflow.get_metadata(workflow_id, task_id)["attempts"]]


def go(folder: Path) -> None:
    (folder / "go").touch()


def hosts() -> list[Any]:
    """Handles of the workflows' hosts on this cluster."""
    named = ray.util.list_named_actors(all_namespaces=True)
    names = [each["name"] for each in named if each["namespace"] == NAMESPACE]
    found = []
    for name in names:
        # One may die in between.
        with contextlib.suppress(ValueError):
            found.append(ray.get_actor(name, namespace=NAMESPACE))
    return found


def end_hosts() -> None:
    """Let the hosts die for good."""
    for host in hosts():
        ray.kill(host)
    until(lambda: not hosts(), "end of the hosts")


def kill_driver(workflow_id: str) -> int:
    """SIGKILL to the process that drives a workflow; its actor comes back by itself."""
    owner = workflow.read_run(store(), workflow_id).owner
    assert owner is not None
    os.kill(owner["pid"], signal.SIGKILL)
    return int(owner["pid"])


def store() -> Any:
    from verl_workflow.workflow import _session

    return _session.storage()


def named(task_id: str, **more: Any) -> dict[str, Any]:
    """Options of Ray's that name a step."""
    return dict(**workflow.options(task_id=task_id, **more))


@ray.remote
def add(a: int, b: int) -> int:
    return a + b


@ray.remote
def gather(refs: list[Any]) -> list[Any]:
    return ray.get(refs)


@ray.remote
def marked(folder: Path, name: str, value: Any = None, *after: Any) -> Any:
    mark(folder, name)
    return value


@ray.remote
def waiting(folder: Path, name: str, value: Any = None, *after: Any) -> Any:
    return waits_for(folder, name, value)


@ray.remote
def refusing_until(folder: Path, name: str, file: str, value: Any = None) -> Any:
    """Fails until the file is there."""
    mark(folder, name)
    if not (folder / file).exists():
        raise Refused(f"no {file}")
    return value


def steps_of(workflow_id: str) -> Any:
    return workflow.read_run(store(), workflow_id).steps.items()
