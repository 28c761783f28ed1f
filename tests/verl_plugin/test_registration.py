"""What `import verl` registers, seen from fresh interpreters."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from verl_workflow.verl_plugin import _accelerator

REPORT = """
import json, logging, sys
import verl
at_once = sorted(name for name in sys.modules if name.startswith(("verl.workers", "verl_workflow.")))
from verl.plugin.platform.platform_manager import PlatformRegistry
import verl.workers.engine
from verl.workers.engine.base import EngineRegistry
from verl.workers.rollout.base import get_rollout_class
from verl.workers.rollout.replica import RolloutReplicaRegistry
engines = EngineRegistry._engines["value_model"]["fsdp2"]
from verl.plugin.platform import get_platform
print(json.dumps({
    "at_once": at_once,
    "platforms": list(PlatformRegistry.registered_names()),
    "platform": get_platform().device_name,
    "engines": {str(key): value.__name__ for key, value in engines.items()},
    "replica": RolloutReplicaRegistry.get("hf").__name__,
    "adapter": get_rollout_class("hf").__module__,
}))
"""


def python(code: str, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = {k: v for k, v in os.environ.items() if k != "VERL_PLATFORM"} | variables
    return subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, env=environment, timeout=300
    )


def test_forced_to_the_cpu_all_is_registered_and_verls_workers_are_left_for_later() -> None:
    out = python(REPORT, VERL_PLATFORM="cpu")
    assert out.returncode == 0, out.stderr
    report = json.loads(out.stdout.splitlines()[-1])
    assert [name for name in report["at_once"] if name.startswith("verl.workers")] == []
    assert "verl_workflow.verl_plugin._platform" in report["at_once"]
    assert "verl_workflow.verl_plugin._engine" not in report["at_once"]
    # Behind verl's own: an accelerator that is found wins.
    assert report["platforms"][-1] == "cpu"
    assert report["platform"] == "cpu"
    assert report["engines"]["cpu"] == "CPUEngineWithValueHead"
    assert report["replica"] == "HFReplica"
    assert report["adapter"] == "verl_workflow.verl_plugin._rollout"


def test_with_an_accelerator_only_the_rollout_is_added() -> None:
    out = python(REPORT, VERL_PLATFORM="nvidia")
    assert out.returncode == 0, out.stderr
    report = json.loads(out.stdout.splitlines()[-1])
    assert "cpu" not in report["platforms"]
    assert report["platform"] == "cuda"
    assert "cpu" not in report["engines"]
    assert "cuda" in report["engines"]
    assert "verl_workflow.verl_plugin._platform" not in report["at_once"]
    assert report["replica"] == "HFReplica"


def test_a_failed_registration_is_told_on_stderr_although_verl_hides_it() -> None:
    breaking = (
        "import importlib.abc, sys\n"
        "class Breaks(importlib.abc.MetaPathFinder):\n"
        "    def find_spec(self, name, path, target=None):\n"
        "        if name == 'verl_workflow.verl_plugin._platform': raise OSError('disk on fire')\n"
        "sys.meta_path.insert(0, Breaks())\n"
    )
    out = python(breaking + "import verl\nprint('verl is usable', verl.__version__)", VERL_PLATFORM="cpu")
    assert out.returncode == 0
    assert "verl is usable" in out.stdout
    assert "verl_workflow.verl_plugin could not be registered with verl" in out.stderr
    assert "disk on fire" in out.stderr


@pytest.mark.parametrize(
    ("chosen", "driver", "expected"),
    [
        ("cpu", True, True),
        (" CPU ", True, True),
        ("nvidia", False, False),
        ("", True, False),
        (None, True, False),
        (None, False, True),
    ],
)
def test_the_environment_decides_before_the_driver(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, chosen: str | None, driver: bool, expected: bool
) -> None:
    device = tmp_path / "device"
    if driver:
        device.touch()
    monkeypatch.setattr(_accelerator, "DRIVERS", (str(tmp_path / "none"), str(device)))
    if chosen is None:
        monkeypatch.delenv("VERL_PLATFORM", raising=False)
    else:
        monkeypatch.setenv("VERL_PLATFORM", chosen)
    # Hidden devices say nothing about the machine.
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert _accelerator.without_accelerator() is expected
