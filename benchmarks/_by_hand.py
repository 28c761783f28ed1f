"""The quick-start's training, and the same training as somebody types it who uses verl alone."""

from __future__ import annotations

import json
import os
import shutil
import sys
from pathlib import Path
from typing import Any

from verl_workflow.spec import dump, load

_ROOT = Path(__file__).parents[1]
_VARIABLES = "ray_kwargs.ray_init.runtime_env.env_vars."


def training_only(folder: Path, *, steps: int, **changes: Any) -> Path:
    """A pipeline file in the folder: the quick-start without its evaluation and promotion.

    Args:
        changes: fields of its training.
    """
    shutil.copytree(_ROOT / "pipelines", folder / "pipelines")
    pipeline = load(folder / "pipelines" / "quickstart.yaml", {"steps": str(steps)}).pipeline
    kept = [
        stage.model_copy(update=changes) if stage.kind == "verl" else stage
        for stage in pipeline.stages
        if stage.kind not in {"evaluate", "promote"}
    ]
    path = folder / "pipelines" / "training.yaml"
    path.write_text(dump(pipeline.model_copy(update={"stages": kept, "params": {}})))
    return path


def environment(settings: dict[str, Any], metrics: Path) -> dict[str, str]:
    """Variables for verl alone, with those that the pipeline gave its workers."""
    made = dict(os.environ, HYDRA_FULL_ERROR="1", HF_HUB_OFFLINE="1")
    made |= {name.removeprefix(_VARIABLES): value for name, value in settings.items() if name.startswith(_VARIABLES)}
    return {**made, "VERL_FILE_LOGGER_PATH": str(metrics)}


def command(settings: dict[str, Any], checkpoints: Path) -> list[str]:
    """``python -m verl.trainer.main_ppo`` with the settings that the pipeline used, on a Ray of its own."""
    chosen = {name: value for name, value in settings.items() if not name.startswith("ray_kwargs.")}
    # What the pipeline adds to verl is left out; what the training is, is the same.
    for name in ("trainer.checkpoint_callback_class", "trainer.v1.supervised", "trainer.resume_from_path"):
        chosen.pop(name, None)
    chosen["trainer.v1.trainer_mode"] = chosen["trainer.v1.trainer_mode"].removeprefix("supervised_")
    chosen["trainer.resume_mode"] = "auto"
    chosen["trainer.default_local_dir"] = str(checkpoints)
    chosen["ray_kwargs.ray_init.address"] = "local"
    chosen["ray_kwargs.ray_init.num_cpus"] = 12
    chosen["ray_kwargs.ray_init.num_gpus"] = 1
    chosen["ray_kwargs.ray_init.include_dashboard"] = False
    words = (f"++{name}={_hydra(value)}" for name, value in chosen.items())
    return [sys.executable, "-m", "verl.trainer.main_ppo", *words]


def _hydra(value: Any) -> str:
    """A value in hydra's override grammar: JSON, but for the keys of a mapping, which stand bare."""
    if isinstance(value, dict):
        return "{" + ",".join(f"{key}:{_hydra(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ",".join(map(_hydra, value)) + "]"
    return json.dumps(value)
