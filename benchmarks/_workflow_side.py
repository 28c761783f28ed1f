"""One side of workflow_vs_ray247.py: runs the graphs and prints the seconds. Arguments: ours or original, a folder."""

from __future__ import annotations

import json
import logging
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ray


def main(side: str, folder: str) -> None:
    options: dict[str, Any] = {
        "num_cpus": 2,
        "include_dashboard": False,
        "logging_level": logging.ERROR,
        "log_to_driver": False,
        "_temp_dir": f"{folder}/ray",
    }
    if side == "original":
        ray.init(address="local", storage=f"file://{folder}/storage", **options)
        from ray import workflow
    else:
        ray.init(address="local", **options)
        from verl_workflow import workflow

        workflow.init(storage=f"{folder}/storage")
    try:
        print(json.dumps(_seconds(workflow, Path(folder))))
    finally:
        ray.shutdown()


def _seconds(workflow: Any, folder: Path) -> dict[str, float]:
    @ray.remote
    def nothing(*before: Any) -> None:
        return None

    @ray.remote
    def large(number: int) -> bytes:
        return bytes([number]) * 1_000_000

    @ray.remote
    def sizes(*values: bytes) -> int:
        return sum(map(len, values))

    @ray.remote
    def waits_for_mark(mark: str, *before: Any) -> None:
        if not Path(mark).exists():
            raise RuntimeError("not yet")

    def fan_out(width: int) -> Any:
        return nothing.bind(*[nothing.bind() for _ in range(width)])

    def chain(length: int) -> Any:
        step = nothing.bind()
        for _ in range(length - 1):
            step = nothing.bind(step)
        return step

    def plain() -> None:
        ray.get(nothing.remote(*[nothing.remote() for _ in range(200)]))

    # Workers and whatever else is started once.
    for _ in range(2):
        workflow.run(fan_out(20))
        plain()
    found = {
        "plain_fan_out_200": _best(plain),
        "fan_out_200": _best(lambda: workflow.run(fan_out(200))),
        "chain_200": _best(lambda: workflow.run(chain(200)), times=1),
        "results_1mb_50": _best(lambda: workflow.run(sizes.bind(*[large.bind(n) for n in range(50)])), times=1),
    }
    mark = folder / "mark"
    graph = waits_for_mark.bind(str(mark), *[nothing.bind() for _ in range(1000)])
    try:
        workflow.run(graph, workflow_id="to_be_resumed")
    except workflow.WorkflowExecutionError:
        mark.touch()
    found["resume_1000"] = _best(lambda: workflow.resume("to_be_resumed"), times=1)
    ray.get([workflow.run_async(nothing.bind(), workflow_id=f"one_of_many_{n}") for n in range(1000)])
    found["list_1000"] = _best(lambda: workflow.list_all())
    return found


def _best(action: Callable[[], Any], times: int = 3) -> float:
    """Seconds of the fastest of so many: what the machine does besides only adds."""
    seconds = []
    for _ in range(times):
        started = time.perf_counter()
        action()
        seconds.append(time.perf_counter() - started)
    return min(seconds)


main(*sys.argv[1:])
