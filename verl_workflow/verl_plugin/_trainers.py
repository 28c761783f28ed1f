"""verl's trainers with what a supervised stage needs of them, registered beside verl's own as ``supervised_<mode>``.

They train as verl's do. They save and end when they are asked to hand over, end when a later attempt has taken their
place, and place their workers in the placement groups that the stage holds.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from verl_workflow.verl_plugin._placed import ROLLOUT, held_pools, place_replicas

MODES = ("sync", "colocate_async", "separate_async")
PREFIX = "supervised_"
# Below `trainer.v1`: where signs are looked for, where checkpoints lie and who owns them, groups to place workers in.
SECTION = "supervised"


def register() -> None:
    """Register them; verl's own have been by then."""
    from verl.trainer.ppo.v1 import get_trainer_cls, register_trainer

    for mode in MODES:
        register_trainer(f"{PREFIX}{mode}")(_supervised(mode, get_trainer_cls(mode)))


def _supervised(mode: str, base: Any) -> Any:
    class Supervised(base):
        def __init__(self, config: Any, *args: Any, **kwargs: Any) -> None:
            # verl compares the name of the mode with its own in many places.
            config.trainer.v1.trainer_mode = mode
            self._facts = config.trainer.v1.get(SECTION) or {}
            self._handing_over = False
            super().__init__(config, *args, **kwargs)

        def _setup(self) -> None:
            if apart := self._groups.get(ROLLOUT):
                place_replicas(self.config.actor_rollout_ref.rollout.name, apart)
            super()._setup()

        def _init_resource_pool_mgr(self) -> None:
            super()._init_resource_pool_mgr()
            if self._groups:
                self.resource_pool_manager: Any = held_pools(self.resource_pool_manager, self._groups)

        @property
        def _groups(self) -> Any:
            """Placement groups that the stage holds, by pool."""
            return self._facts.get("groups") or {}

        def on_step_begin(self) -> None:
            if self._handing_over:
                from verl_workflow.training._handover import HandedOver

                raise HandedOver(f"saved after step {self.global_steps - 1} and ended, as the node is taken away")
            if "owner" in self._facts:
                from verl_workflow.training._owner import require_owner

                require_owner(Path(self._facts["checkpoints"]), self._facts["owner"])
            super().on_step_begin()

        def on_step_end(self) -> None:
            super().on_step_end()
            if self._asked() and not self._handing_over:
                self._handing_over = True
                if not (Path(self._facts["checkpoints"]) / f"global_step_{self.global_steps}").exists():
                    self._save_checkpoint()

        def _asked(self) -> bool:
            from verl_workflow.training._handover import is_asked

            place = self._facts.get("attempt_dir")
            return place is not None and is_asked(Path(place))

    Supervised.__name__ = Supervised.__qualname__ = f"Supervised{base.__name__}"
    return Supervised
