"""verl's configuration, composed from the installed package without importing it (verl costs seconds and torch)."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping, Sequence
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


def base_config(engine: str = "dp", groups: Sequence[str] = ()) -> Any:
    """verl's own defaults for the engine (``dp`` is FSDP), as an OmegaConf tree.

    Args:
        groups: hydra's choices among verl's config groups, ``actor@actor_rollout_ref.actor=megatron_actor``.

    Raises UserError(OVERRIDE_INVALID) for a group that does not exist.
    """
    from hydra import compose, initialize_config_dir
    from hydra.errors import HydraException

    folder = verl_folder() / "trainer" / "config"
    with initialize_config_dir(config_dir=str(folder), version_base=None):
        try:
            return compose("ppo_trainer", overrides=[f"{ENGINE}={engine}", *groups])
        except HydraException as error:
            raise UserError(
                ErrorCode.OVERRIDE_INVALID,
                next(iter(str(error).splitlines()), "the configuration cannot be composed"),
                value=list(groups) or engine,
                remedy="Choose from the folders of verl's trainer/config.",
            ) from error


def compose_config(settings: Mapping[str, Any], groups: Sequence[str] = ()) -> Any:
    """verl's defaults with `settings` (dotted key -> value) put in; keys verl does not have are added."""
    from omegaconf import OmegaConf

    config = base_config(str(settings.get(ENGINE, "dp")), groups)
    for key, value in settings.items():
        if key != ENGINE:
            OmegaConf.update(config, key, value, merge=False, force_add=True)
    return config


def select(config: Any, key: str) -> Any:
    """The value behind a dotted key of an OmegaConf tree, with its interpolations resolved; None when there is none."""
    from omegaconf import OmegaConf

    return OmegaConf.select(config, key)
