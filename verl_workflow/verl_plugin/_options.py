"""The rollout's own settings: ``+actor_rollout_ref.rollout.engine_kwargs.hf.<name>=<value>``."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from verl_workflow.errors import ErrorCode, UserError

WHERE = "actor_rollout_ref.rollout.engine_kwargs.hf"


class Options(BaseModel):
    """Settings of the rollout `hf`."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    batch_window_s: float = Field(default=0.05, ge=0)
    """A batch starts when no request has come for this long, in seconds."""

    weights: Literal["ipc", "host"] = "ipc"
    """How weights come from the trainer on CUDA: opened in place, or through host memory as on the CPU."""

    @classmethod
    def of(cls, config: Any) -> Options:
        """The options in verl's rollout section.

        Raises:
            UserError: `override_invalid`, a name is unknown or a value is out of range.
        """
        given = dict((config.engine_kwargs or {}).get("hf") or {})
        try:
            return cls(**given)
        except ValidationError as error:
            first = error.errors()[0]
            raise UserError(
                ErrorCode.OVERRIDE_INVALID,
                first["msg"],
                where=".".join([WHERE, *map(str, first["loc"])]),
                value=first["input"],
                remedy=f"The settings are {', '.join(sorted(cls.model_fields))}",
            ) from error
