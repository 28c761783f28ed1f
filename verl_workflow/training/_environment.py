"""The environment of a training: of verl's driver process, and of its Ray workers."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

# What Ray sets in its workers: a driver that inherits it would take itself for part of the worker's job.
_WORKER_ONLY = (
    "CUDA_VISIBLE_DEVICES",
    "RAY_ADDRESS",
    "RAY_CLIENT_MODE",
    "RAY_JOB_CONFIG_JSON_ENV_VAR",
    "RAY_JOB_ID",
    "RAY_NODE_ID",
    "RAY_RAYLET_PID",
    "RAY_RUNTIME_ENV_CREATE_WORKING_DIR",
    "RAY_USE_MULTIPROCESSING_CPU_COUNT",
    "RAY_WORKER_PROCESS_SETUP_HOOK",
)


def worker_variables(*, platform: str, metrics: Path, code_dir: Path) -> dict[str, str]:
    """Variables that each of verl's processes must have, wherever Ray starts it.

    Args:
        platform: verl's name for the accelerator. Left to itself verl looks for one on the machine it is on, and its
            driver may be on one that has none.
    """
    return {
        "HF_HUB_OFFLINE": "1",
        "PYTHONPATH": os.pathsep.join([str(code_dir), *_inherited_path()]),
        "TQ_NUM_THREADS": "2",
        "VERL_FILE_LOGGER_PATH": str(metrics),
        "VERL_PLATFORM": platform,
    }


def driver_environment(variables: Mapping[str, str]) -> dict[str, str]:
    """This process's environment without what Ray set in it as a worker, and with `variables`."""
    import ray

    in_worker = ray.get_runtime_context().worker.mode == ray.WORKER_MODE
    dropped = _WORKER_ONLY if in_worker else ()
    kept = {name: value for name, value in os.environ.items() if name not in dropped}
    return {**kept, "HYDRA_FULL_ERROR": "1", "RAY_DEDUP_LOGS": "0", "PYTHONUNBUFFERED": "1", **variables}


def _inherited_path() -> list[str]:
    return [entry for entry in os.environ.get("PYTHONPATH", "").split(os.pathsep) if entry]
