"""verl's own engines on the CPU, each in a process of its own with its process group, as in a worker."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

PRELUDE = """
import json, os, sys
import torch
import verl
from verl.plugin.platform import get_platform
from verl.utils.device import get_nccl_backend
from verl.trainer.config import CheckpointConfig
from verl.workers.config import FSDPEngineConfig, FSDPOptimizerConfig, HFModelConfig
from verl.workers.engine import EngineRegistry

get_nccl_backend()  # as verl does before it would join a group
# What verl's workers do; no group is made as there is one.
if not torch.distributed.is_initialized():
    raise SystemExit("no process group")

FP32 = {"param_dtype": "fp32", "reduce_dtype": "fp32", "buffer_dtype": "fp32"}

def build(model_type, **settings):
    engine_config = FSDPEngineConfig(**{
        "strategy": "fsdp2", "use_torch_compile": False, "dtype": "float32", "model_dtype": "fp32",
        "mixed_precision": FP32, **settings,
    })
    model_config = HFModelConfig(
        path=sys.argv[1], model_type=model_type, use_remove_padding=False, enable_gradient_checkpointing=False,
        override_config={"attn_implementation": "eager"},
    )
    engine = EngineRegistry.new(
        model_type=model_type, backend=engine_config.strategy, model_config=model_config,
        engine_config=engine_config, optimizer_config=FSDPOptimizerConfig(lr=1e-3, total_training_steps=10),
        checkpoint_config=CheckpointConfig(),
    )
    engine.initialize()
    return engine
"""


def in_worker(code: str, folder: Path, tmp_path: Path) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {
        "VERL_PLATFORM": "cpu",
        "RANK": "0",
        "WORLD_SIZE": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "0",
        "DIST_INIT_METHOD": f"file://{tmp_path / 'rendezvous'}",
    }
    return subprocess.run(
        [sys.executable, "-W", "ignore", "-c", PRELUDE + code, str(folder)],
        capture_output=True,
        text=True,
        env=environment,
        timeout=300,
    )


def report(out: subprocess.CompletedProcess[str]) -> Any:
    assert out.returncode == 0, out.stderr
    return json.loads(out.stdout.splitlines()[-1])


def test_actor_reference_and_critic_are_built_for_the_cpu(tiny_model: Path, tmp_path: Path) -> None:
    code = """
actor = build("language_model")
reference = build("language_model", forward_only=True)
critic = build("value_model")
params, _ = actor.get_per_tensor_param()
names = [name for name, _ in params]
ids = torch.tensor([[10, 11, 12]])
with torch.no_grad():
    same = bool(torch.equal(actor.module(ids).logits, reference.module(ids).logits))
    values = list(critic.module(ids).logits.shape)
print(json.dumps({
    "backend": torch.distributed.get_backend(),
    "classes": [type(engine).__name__ for engine in (actor, reference, critic)],
    "forward_only": reference.engine_config.forward_only,
    "optimizers": [engine.optimizer is not None for engine in (actor, reference, critic)],
    "devices": sorted({str(p.device) for e in (actor, reference, critic) for p in e.module.parameters()}),
    "attention": critic.module.config._attn_implementation,
    "names": names, "same": same, "values": values, "threads": torch.get_num_threads(),
}))
"""
    seen = report(in_worker(code, tiny_model, tmp_path))
    assert seen["backend"] == "gloo"
    assert seen["classes"] == ["CPUEngineWithLMHead", "CPUEngineWithLMHead", "CPUEngineWithValueHead"]
    assert seen["forward_only"] is True
    assert seen["optimizers"] == [True, False, True]
    assert seen["devices"] == ["cpu"]
    assert seen["attention"] == "eager"
    assert "model.embed_tokens.weight" in seen["names"]
    assert seen["same"]
    assert seen["values"] == [1, 3, 1]
    assert seen["threads"] == 1


@pytest.mark.parametrize(
    ("settings", "told"),
    [('strategy="fsdp"', "to fsdp2 for each role"), ("offload_policy=True", "fsdp_config.offload_policy")],
)
def test_what_needs_an_accelerator_is_refused_with_a_remedy(
    tiny_model: Path, tmp_path: Path, settings: str, told: str
) -> None:
    out = in_worker(f'build("language_model", {settings})', tiny_model, tmp_path)
    assert out.returncode == 1
    assert "verl_workflow.errors.UserError" in out.stderr
    assert told in out.stderr
