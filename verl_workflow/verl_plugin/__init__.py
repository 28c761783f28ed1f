"""What verl needs to run on a machine with no accelerator, and a rollout that needs no inference engine.

verl imports this module inside ``import verl`` (entry-point group ``verl.plugins``), in every process. The import
registers:

- the platform ``cpu`` and verl's FSDP2 engines for it, only where this machine is meant to be used without an
  accelerator: ``VERL_PLATFORM=cpu`` is set, or it is not set and no accelerator driver is found;
- the rollout ``hf`` (``actor_rollout_ref.rollout.name=hf``), always: transformers on the CPU or on CUDA;
- verl's trainers as supervised stages use them (``trainer.v1.trainer_mode=supervised_sync``);

and makes `FastReplayBuffer` available to verl as ``pkg://verl_workflow.verl_plugin.sampler``.

Only the platform is registered at once. The rest waits until verl imports the registry in question, as importing
verl's workers would add half again to the start of the many processes that never use them.
"""

from __future__ import annotations

import logging

from verl_workflow.verl_plugin._hook import after_import

__all__: list[str] = []

_log = logging.getLogger(__name__)


def _register_engines() -> None:
    from verl_workflow.verl_plugin import _engine

    _engine.register()


def _register_rollout() -> None:
    from verl.workers.rollout.base import _ROLLOUT_REGISTRY
    from verl.workers.rollout.replica import RolloutReplicaRegistry

    def load() -> type:
        from verl_workflow.verl_plugin._rollout import HFReplica

        return HFReplica

    RolloutReplicaRegistry.register("hf", load)
    _ROLLOUT_REGISTRY[("hf", "async")] = "verl_workflow.verl_plugin._rollout.ServerAdapter"


def _register_trainers() -> None:
    from verl_workflow.verl_plugin import _trainers

    _trainers.register()


def _register() -> None:
    from verl_workflow.verl_plugin._accelerator import without_accelerator

    if without_accelerator():
        from verl_workflow.verl_plugin import _platform

        _platform.register()
        after_import("verl.workers.engine", _register_engines)
    after_import("verl.workers.rollout", _register_rollout)
    after_import("verl.trainer.ppo.v1", _register_trainers)


try:
    _register()
except Exception:
    # verl logs the failure of a plugin at DEBUG and goes on, to fail later for another reason.
    _log.exception("verl_workflow.verl_plugin could not be registered with verl")
    raise
