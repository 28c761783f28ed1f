"""verl's configuration, composed from the installed package without importing it (verl costs seconds and torch)."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from verl_workflow.errors import ErrorCode, UserError

# Chooses among verl's config groups, so hydra has to see it; all other settings are applied to the composed tree.
ENGINE = "model_engine"


def verl_folder() -> Path:
    """Folder of the installed verl. Raises UserError(DEPENDENCY_MISSING) when there is none."""
    spec = importlib.util.find_spec("verl")
    if spec is None or not spec.submodule_search_locations:
        raise UserError(
            ErrorCode.DEPENDENCY_MISSING,
            "verl is not installed",
            remedy="Install it with: pip install 'verl-workflow[verl]'",
        )
    return Path(next(iter(spec.submodule_search_locations)))


def base_config(engine: str = "dp") -> Any:
    """verl's own defaults for the engine (``dp`` is FSDP), as an OmegaConf tree."""
    from hydra import compose, initialize_config_dir

    folder = verl_folder() / "trainer" / "config"
    with initialize_config_dir(config_dir=str(folder), version_base=None):
        return compose("ppo_trainer", overrides=[f"{ENGINE}={engine}"])


def compose_config(settings: Mapping[str, Any]) -> Any:
    """verl's defaults with `settings` (dotted key -> value) put in; keys verl does not have are added."""
    from omegaconf import OmegaConf

    config = base_config(str(settings.get(ENGINE, "dp")))
    for key, value in settings.items():
        if key != ENGINE:
            OmegaConf.update(config, key, value, merge=False, force_add=True)
    return config
