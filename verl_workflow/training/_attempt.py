"""An attempt at a verl stage: its files, its settings, and the checkpoints and metrics it stands on."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from verl_workflow.artifacts import Artifact
from verl_workflow.spec._training import VerlStage
from verl_workflow.trackers import Facts
from verl_workflow.training import _checkpoints, _cluster, _metrics, _retention
from verl_workflow.training._environment import driver_environment, worker_variables
from verl_workflow.training._extend import origin
from verl_workflow.training._names import StageName
from verl_workflow.training._overrides import world_size
from verl_workflow.training._owner import owner_of, require_owner, saving_folder
from verl_workflow.verl_config._compose import compose_config, select
from verl_workflow.warm import SUPERVISOR

if TYPE_CHECKING:
    # The pipeline runs stages; importing it here would close the circle.
    from verl_workflow.pipeline._context import StageContext


_CALLBACK = "verl_workflow.training._manifest.ManifestCallback"
# What verl's process says of its end.
RESULT = "result.json"


@dataclass(frozen=True, kw_only=True)
class Attempt:
    """One attempt at a verl stage: where it reads and writes, and what verl is told.

    Attributes:
        written: verl's settings as the stage asks for them, dotted key -> value.
        changes: those that earlier failures have made differ.
        identity: digests and sizes that its checkpoints are bound to.
        checkpoint_dir: shared by all attempts at the stage.
    """

    spec: VerlStage
    ctx: StageContext
    written: Mapping[str, Any]
    changes: Mapping[str, Any]
    identity: Mapping[str, Any]
    checkpoint_dir: Path

    @property
    def chosen(self) -> Mapping[str, Any]:
        """verl's settings as they are in force."""
        return {**self.written, **self.changes}

    @property
    def log(self) -> Path:
        return self.ctx.attempt_dir / "log.txt"

    @property
    def metrics(self) -> Path:
        return self.ctx.attempt_dir / _metrics.FILE_NAME

    @property
    def roles(self) -> tuple[str, ...]:
        """Whose weights a checkpoint holds."""
        return roles_of(self.spec)

    def newest(self) -> _checkpoints.Checkpoint | None:
        """The newest checkpoint that can be resumed from."""
        return _checkpoints.newest_valid(self.checkpoint_dir, **self._bound)

    def tidied(self) -> tuple[_checkpoints.Checkpoint | None, Sequence[str]]:
        """As `newest`, with all else out of the way, and what was wrong with it; only while nothing trains."""
        self.require_owner()
        whole, broken = _checkpoints.tidy(self.checkpoint_dir, **self._bound)
        self.prune()
        return (whole[-1] if whole else None), broken

    def prune(self) -> None:
        """Delete the checkpoints that the stage does not keep; also while it trains."""
        self.require_owner()
        _retention.prune(self.checkpoint_dir, keep=self.spec.keep, keep_best=self.spec.keep_best, rows=self.rows())

    def best(self) -> _retention.Best | None:
        """The best checkpoint by the stage's `keep_best`; None when there is none, or nobody asked."""
        if self.spec.keep_best is None:
            return None
        return _retention.best_of(self.checkpoint_dir, self.rows(), self.spec.keep_best, **self._bound)

    @property
    def _bound(self) -> dict[str, Any]:
        """What a checkpoint must be to be resumed from."""
        return {"world_size": world_size(self.chosen), "roles": self.roles, "identity": self.identity}

    def require_owner(self) -> None:
        """Raise OvertakenError when a later attempt has the checkpoints."""
        require_owner(self.checkpoint_dir, self.owner)

    @property
    def owner(self) -> str:
        """How it signs what it writes into the folder that all attempts share."""
        return owner_of(self.ctx.epoch, self.ctx.attempt)

    @property
    def namespace(self) -> str:
        """Ray's, of the job in which it trains."""
        return StageName.of(self.ctx).job(self.owner)

    @property
    def facts(self) -> Facts:
        """What trackers are told."""
        return Facts(
            run_id=self.ctx.run_id,
            stage=self.ctx.stage,
            records=self.ctx.records,
            trackers=[tracker.model_dump(mode="json") for tracker in self.spec.trackers],
            settings=self.written,
            tags={name: str(value) for name, value in self.identity.items() if "." not in name},
        )

    def own_rows(self) -> list[_metrics.Row]:
        """Metrics of this attempt alone."""
        return _metrics.merge([self.metrics])

    def rows(self) -> list[_metrics.Row]:
        """Metrics of all attempts so far, this one included."""
        folders = sorted((self.ctx.stage_dir / "attempts").iterdir())
        return _metrics.merge(folder / self.metrics.name for folder in folders if folder <= self.ctx.attempt_dir)

    def outputs(
        self, done: _checkpoints.Checkpoint, best: _retention.Best | None, model: Path, warnings: Sequence[str]
    ) -> dict[str, Any]:
        rows = [row for row in self.rows() if row.step <= done.step]
        merged = self.ctx.attempt_dir / "metrics.jsonl"
        _metrics.write(rows, merged)
        return {
            "model": Artifact.of(model).to_json(),
            "checkpoint": {"path": str(done.path), "step": done.step},
            "best": best.to_json() if best else None,
            "metrics": Artifact.of(merged).to_json(),
            "step": done.step,
            "reward": _metrics.rewards(rows),
            "warnings": [*warnings, *self._differences()],
            "extended": origin(self.checkpoint_dir),
        }

    def _differences(self) -> list[str]:
        config = compose_config(self.written) if self.changes else None
        return [
            f"{key} was {value:g} instead of {select(config, key):g}, after failures"
            for key, value in self.changes.items()
        ]


def roles_of(spec: VerlStage) -> tuple[str, ...]:
    """Whose weights a checkpoint of the stage holds."""
    return ("actor", "critic") if spec.algorithm == "ppo" else ("actor",)


def write_launch(
    attempt: Attempt,
    start: _checkpoints.Checkpoint | None,
    *,
    groups: Mapping[str, Sequence[str]],
    workers: str | None = None,
) -> dict[str, str]:
    """Write what the process reads; return its environment.

    Args:
        groups: ids of the placement groups that are held for it, by verl's name of the pool.
        workers: what Ray starts verl's workers with, in place of ``python``.
    """
    import ray

    platform = _cluster.verl_platform(str(attempt.chosen["trainer.device"]))
    variables = worker_variables(platform=platform, metrics=attempt.metrics, code_dir=attempt.ctx.code_dir)
    chosen = {
        **attempt.chosen,
        "ray_kwargs.ray_init.address": ray.get_runtime_context().gcs_address,
        # Its named actors are found by it, should they be left behind.
        "ray_kwargs.ray_init.namespace": attempt.namespace,
        **{f"ray_kwargs.ray_init.runtime_env.env_vars.{name}": value for name, value in variables.items()},
        "trainer.v1.trainer_mode": f"supervised_{attempt.chosen.get('trainer.v1.trainer_mode', 'sync')}",
        "trainer.v1.supervised": {
            "attempt_dir": str(attempt.ctx.attempt_dir),
            "checkpoints": str(attempt.checkpoint_dir),
            "owner": attempt.owner,
            "identity": dict(attempt.identity),
            "roles": list(attempt.roles),
            "callback": attempt.chosen.get("trainer.checkpoint_callback_class"),
            "groups": {pool: list(ids) for pool, ids in groups.items()},
        },
        "trainer.checkpoint_callback_class": _CALLBACK,
        "trainer.default_local_dir": str(saving_folder(attempt.checkpoint_dir, attempt.owner)),
    }
    if workers is not None:
        chosen["ray_kwargs.ray_init.runtime_env.py_executable"] = workers
    if start is not None:
        chosen |= {"trainer.resume_mode": "resume_path", "trainer.resume_from_path": str(start.path)}
    launch = {"supervisor": os.getpid(), "settings": chosen}
    (attempt.ctx.attempt_dir / "launch.json").write_text(json.dumps(launch, indent=1), encoding="utf-8")
    return {**driver_environment(variables), SUPERVISOR: str(os.getpid())}
