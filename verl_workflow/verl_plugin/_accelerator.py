"""Whether this machine is to be used without an accelerator."""

from __future__ import annotations

import os
from pathlib import Path

DRIVERS = (
    "/proc/driver/nvidia/version",
    "/dev/nvidiactl",
    "/dev/dxg",
    "/dev/kfd",
    "/dev/davinci_manager",
    "/dev/accel",
)
"""What the drivers of NVIDIA (also under WSL), AMD, Ascend and of the kernel's accelerator class leave behind."""


def without_accelerator() -> bool:
    """True if ``VERL_PLATFORM`` is ``cpu``, or is not set and no accelerator driver exists on this machine.

    torch is not asked: Ray hides the devices from processes that reserved none, and verl's own driver is one.
    A cluster with accelerators whose head has none needs ``VERL_PLATFORM=nvidia`` (or whatever it has) in the job's
    environment, as the driver may run there.
    """
    chosen = os.environ.get("VERL_PLATFORM", "").strip().lower()
    if chosen:
        return chosen == "cpu"
    return not any(Path(driver).exists() for driver in DRIVERS)
