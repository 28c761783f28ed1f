"""What a long workflow costs its driver: memory and time by the number of steps, and what resuming it reads.

Run: python benchmarks/workflow_memory.py [--steps 10000]

A chain of steps on a local Ray, driven in this process; each line is a tenth of it.
"""

from __future__ import annotations

import argparse
import json
import logging
import shutil
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import psutil
import ray

from verl_workflow.storage import Store
from verl_workflow.workflow import Driver, RayLauncher, create_run
from verl_workflow.workflow._dag import DagView, is_node
from verl_workflow.workflow._definition import run_key
from verl_workflow.workflow._graph import StepNode, graph_of
from verl_workflow.workflow._journal import Journal
from verl_workflow.workflow._names import RunKey
from verl_workflow.workflow._options import StepOptions


class Counting(Store):
    """Counts the objects that are read."""

    reads = 0

    def get(self, key: str) -> bytes | None:
        self.reads += 1
        return super().get(key)


def one_more(number: int) -> int:
    return number + 1


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=10_000)
    arguments = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="vw-", dir="/tmp"))
    try:
        ray.init(
            address="local",
            num_cpus=2,
            include_dashboard=False,
            logging_level=logging.ERROR,
            log_to_driver=False,
            _temp_dir=str(folder / "ray"),
        )
        _run(Store(str(folder / "storage")), arguments.steps)
    finally:
        ray.shutdown()
        shutil.rmtree(folder, ignore_errors=True)


def _run(store: Store, steps: int) -> None:
    root: Any = 0
    for _ in range(steps):
        root = StepNode(one_more, (root,), {}, StepOptions(ray={"num_cpus": 0}))
    key = RunKey.new("long")
    graph = graph_of(root, DagView(), store, f"{key.folder}/objects", is_node=is_node)
    create_run(store, "long", {})
    driver = Driver(store, "long", graph, RayLauncher())
    thread = threading.Thread(target=driver.run)
    started = time.perf_counter()
    thread.start()
    process = psutil.Process()
    told = 0
    while thread.is_alive():
        time.sleep(0.2)
        entries = store.list(f"{run_key(store, 'long').folder}/journal")
        done = max(len(entries) - 2, 0)
        if done >= told + steps // 10:
            told = done - done % (steps // 10)
            seconds = round(time.perf_counter() - started, 1)
            print(
                json.dumps({"steps": done, "rss_mb": process.memory_info().rss >> 20, "seconds": seconds}), flush=True
            )
    counting = Counting(store.uri)
    started = time.perf_counter()
    state = Journal(counting, run_key(counting, "long")).read()
    seconds = round(time.perf_counter() - started, 3)
    print(json.dumps({"status": state.status.value, "reads_to_resume": counting.reads, "seconds_to_read": seconds}))


if __name__ == "__main__":
    main()
