"""Runs a driver, for being killed or frozen. Arguments: storage, run id, and ``ray`` or ``threads``."""

from __future__ import annotations

import shutil
import sys
import tempfile

from _ray_plans import chain

from verl_workflow.storage import Store
from verl_workflow.workflow import Driver, InlineLauncher, Launcher, RayLauncher, read_run


def drive(storage: str, run_id: str, launcher: Launcher) -> None:
    store = Store(storage)
    plan = chain(read_run(store, run_id).definition, storage, run_id)
    print(Driver(store, run_id, plan, launcher).run().status.value)


def main(storage: str, run_id: str, kind: str) -> None:
    if kind == "threads":
        drive(storage, run_id, InlineLauncher())
        return
    import ray

    folder = tempfile.mkdtemp(prefix="vw-", dir="/tmp")
    ray.init(address="local", num_cpus=2, include_dashboard=False, log_to_driver=False, _temp_dir=folder)
    try:
        drive(storage, run_id, RayLauncher())
    finally:
        ray.shutdown()
        shutil.rmtree(folder, ignore_errors=True)


main(*sys.argv[1:])
