"""The Ray cluster a run uses: the one named, or one of its own on this machine."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from verl_workflow.errors import ErrorCode, UserError, VerlWorkflowError

NAMESPACE = "verl_workflow"
# Logical CPUs of a local cluster: verl asks for 3 for each rank, 1 for TransferQueue's controller and 1 for each of
# its storage units, whatever the machine has; with fewer it would wait for ever on a laptop.
LOCAL_CPUS = 12


def connect(address: str | None, *, code_dir: Path | None = None) -> bool:
    """Join the cluster at `address` or ``RAY_ADDRESS``, or start one that ends with this process.

    Args:
        address: ``host:port`` or ``ray://host:port``; None asks the environment.
        code_dir: travels to the workers as Ray's ``working_dir``.

    Returns:
        True when the cluster is this process's own.

    Raises:
        VerlWorkflowError(CLUSTER_UNREACHABLE): nothing answers at the address.
        UserError(DEPENDENCY_MISSING): Ray is not installed.
    """
    try:
        import ray
    except ImportError as error:
        raise UserError(
            ErrorCode.DEPENDENCY_MISSING,
            "running a pipeline needs Ray",
            remedy='Install it with: uv pip install "verl-workflow[ray,verl]".',
        ) from error

    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    address = address or os.environ.get("RAY_ADDRESS") or None
    runtime_env = {"working_dir": str(code_dir)} if code_dir is not None and any(code_dir.iterdir()) else None
    if address is None or address == "local":
        ray.init(
            address="local",
            num_cpus=max(LOCAL_CPUS, os.cpu_count() or 1),
            num_gpus=None if _has_gpu() else 1,
            include_dashboard=False,
            namespace=NAMESPACE,
            runtime_env=runtime_env,
            log_to_driver=False,
            logging_level="warning",
            _temp_dir=str(Path(tempfile.gettempdir()) / f"verl-workflow-ray-{os.getuid()}"),
        )
        return True
    try:
        ray.init(
            address=address,
            namespace=NAMESPACE,
            runtime_env=runtime_env,
            log_to_driver=False,
            logging_level="warning",
        )
    except (ConnectionError, RuntimeError, TimeoutError) as error:
        raise VerlWorkflowError(
            ErrorCode.CLUSTER_UNREACHABLE,
            f"the Ray cluster cannot be joined: {str(error).splitlines()[0]}",
            value=address,
            remedy="Check the address and that the head node runs, or leave it out to start Ray on this machine.",
            retryable=True,
        ) from error
    return False


def _has_gpu() -> bool:
    return Path("/dev/nvidiactl").exists() or Path("/dev/kfd").exists()
