"""The platform ``cpu`` for verl's platform registry."""

from __future__ import annotations

import os
import types
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from verl.plugin.platform.platform_base import PlatformBase
from verl.plugin.platform.platform_manager import PlatformRegistry


class _DeviceModule(types.ModuleType):
    """`torch.cpu` with the calls that verl makes on ``torch.<device>``: one device with no memory of its own."""

    def __getattr__(self, name: str) -> Any:
        return getattr(torch.cpu, name)

    def is_available(self) -> bool:
        # False keeps verl's memory accounting, which is about device memory, out of the way.
        return False

    def current_device(self) -> str:
        return "cpu"

    def get_device_name(self, *_: Any) -> str:
        # An unknown device to verl's flops counter: its MFU is 0 and not a made-up figure.
        return "CPU"

    def device_count(self) -> int:
        return 1

    def set_device(self, *_: Any) -> None:
        pass

    def synchronize(self, *_: Any) -> None:
        pass

    def empty_cache(self) -> None:
        pass

    def ipc_collect(self) -> None:
        pass

    def memory_allocated(self, *_: Any) -> int:
        return 0

    def memory_reserved(self, *_: Any) -> int:
        return 0

    def max_memory_allocated(self, *_: Any) -> int:
        return 0

    def max_memory_reserved(self, *_: Any) -> int:
        return 0

    def mem_get_info(self, *_: Any) -> tuple[int, int]:
        import psutil

        memory = psutil.virtual_memory()
        return memory.available, memory.total

    def reset_peak_memory_stats(self, *_: Any) -> None:
        pass

    def manual_seed(self, seed: int) -> None:
        torch.manual_seed(seed)

    def manual_seed_all(self, seed: int) -> None:
        torch.manual_seed(seed)

    def get_rng_state(self, *_: Any) -> torch.Tensor:
        return torch.get_rng_state()

    def set_rng_state(self, state: torch.Tensor, *_: Any) -> None:
        torch.set_rng_state(state)


_DEVICE_MODULE = _DeviceModule("verl_workflow.verl_plugin._cpu")


class PlatformCPU(PlatformBase):
    """One device a process, named ``cpu``; gloo for collectives; a slot is one of Ray's logical GPUs."""

    @property
    def device_name(self) -> str:
        return "cpu"

    @property
    def vendor_name(self) -> str:
        return "cpu"

    @property
    def device_module(self) -> types.ModuleType:
        return _DEVICE_MODULE

    def is_available(self) -> bool:
        return True

    def current_device(self) -> str:
        # verl calls it an index but only hands it to torch.device(), where a number would mean an accelerator.
        return "cpu"

    def device_count(self) -> int:
        return 1

    def set_device(self, device_index: int) -> None:
        pass

    def synchronize(self, device_index: int | None = None) -> None:
        pass

    def manual_seed(self, seed: int) -> None:
        torch.manual_seed(seed)

    def manual_seed_all(self, seed: int) -> None:
        torch.manual_seed(seed)

    def set_allocator_settings(self, settings: str) -> None:
        pass

    def empty_cache(self) -> None:
        pass

    def get_device_capability(self, device_index: int = 0) -> tuple[int | None, int | None]:
        return None, None

    def communication_backend_name(self) -> str:
        # verl makes "cpu:gloo,<device>:<this>" of it, and torch refuses the "cpu:gloo,cpu:gloo" that comes out. It
        # asks before it looks whether a group exists, and then leaves an existing one alone: so make it here.
        _join_gloo()
        return "gloo"

    def visible_devices_envvar(self) -> str:
        return "CUDA_VISIBLE_DEVICES"

    @contextmanager
    def nvtx_range(self, msg: str) -> Iterator[None]:
        yield

    def profiler_start(self) -> None:
        pass

    def profiler_stop(self) -> None:
        pass

    def ray_resource_name(self) -> str:
        # verl counts only "GPU" and "NPU" when it checks that a cluster is large enough.
        return "GPU"

    def ray_noset_envvars(self) -> list[str]:
        return []

    def is_ipc_supported(self) -> bool:
        return False

    def cudart(self) -> None:
        return None


def register() -> None:
    """Make the platform known to verl, after those that verl brings: an accelerator that is found comes first."""
    PlatformRegistry.register(platform="cpu")(PlatformCPU)


def _join_gloo() -> None:
    import torch.distributed as dist

    needed = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    if dist.is_initialized() or not all(name in os.environ for name in needed):
        return
    dist.init_process_group(
        backend="gloo",
        rank=int(os.environ["RANK"]),
        world_size=int(os.environ["WORLD_SIZE"]),
        init_method=os.environ.get("DIST_INIT_METHOD"),
    )
