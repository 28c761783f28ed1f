"""Runs a driver on a local Ray of its own; for being killed. Arguments: storage, run id, folder of marks."""

from __future__ import annotations

import shutil
import sys
import tempfile
from pathlib import Path

import ray

sys.path.insert(0, str(Path(__file__).parents[1] / "workflow"))

from _ray_plans import chain

from verl_workflow.storage import Store
from verl_workflow.workflow import Driver, RayLauncher, read_run


def main(storage: str, run_id: str) -> None:
    store = Store(storage)
    folder = tempfile.mkdtemp(prefix="vw-", dir="/tmp")
    ray.init(address="local", num_cpus=2, include_dashboard=False, log_to_driver=False, _temp_dir=folder)
    try:
        plan = chain(read_run(store, run_id).definition, storage, run_id)
        print(Driver(store, run_id, plan, RayLauncher()).run().status.value)
    finally:
        ray.shutdown()
        shutil.rmtree(folder, ignore_errors=True)


main(*sys.argv[1:])
