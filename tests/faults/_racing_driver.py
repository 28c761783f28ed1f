"""Drives workflows on a local Ray of its own, one after the other as it is told on stdin; says on stdout how each went.

Arguments: storage, and the lease in seconds. A line is a run's id; the answer ``<id> <how>``.
"""

from __future__ import annotations

import shutil
import sys
import tempfile
import time

import ray

from verl_workflow.errors import VerlWorkflowError
from verl_workflow.storage import Store
from verl_workflow.workflow import Driver, RayLauncher, read_run
from verl_workflow.workflow._state import read_graph

_LONGEST_STEP_S = 0.3


def main(storage: str, lease_s: str) -> None:
    store = Store(storage)
    folder = tempfile.mkdtemp(prefix="vw-", dir="/tmp")
    ray.init(address="local", num_cpus=1, include_dashboard=False, log_to_driver=False, _temp_dir=folder)
    launcher = RayLauncher()
    try:
        print("ready", flush=True)
        for line in sys.stdin:
            run_id = line.strip()
            workflow = read_run(store, run_id).definition["workflow"]
            graph = read_graph(store, workflow["graph"], workflow["sha256"])
            try:
                driver = Driver(store, run_id, graph, launcher, lease_s=float(lease_s), heartbeat_s=0.05, poll_s=0.05)
                how = driver.run().status.value
            except VerlWorkflowError as error:
                how = error.code.value
                # If Ray ends this process for a step that it was cancelling, then before the answer.
                time.sleep(_LONGEST_STEP_S)
            print(run_id, how, flush=True)
    finally:
        ray.shutdown()
        shutil.rmtree(folder, ignore_errors=True)


main(*sys.argv[1:])
