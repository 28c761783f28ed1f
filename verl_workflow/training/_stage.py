"""The story of one attempt at a verl stage."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from verl_workflow.artifacts import Artifact
from verl_workflow.errors import ErrorCode, UserError, UserErrors, VerlWorkflowError
from verl_workflow.spec._model import VerlStage
from verl_workflow.training import _checkpoints, _cluster, _failures, _metrics
from verl_workflow.training._check import check_settings
from verl_workflow.training._environment import driver_environment, worker_variables
from verl_workflow.training._export import export
from verl_workflow.training._identity import bind
from verl_workflow.training._overrides import Inputs, cpus_needed, settings, world_size
from verl_workflow.training._process import ChildProcess, tail
from verl_workflow.training._watch import Watch

if TYPE_CHECKING:
    # The pipeline runs stages; importing it here would close the circle.
    from verl_workflow.pipeline._context import StageContext

_POLL_SECONDS = 0.5
_ENTRY = "verl_workflow.training.entry"


def run_verl_stage(spec: VerlStage, ctx: StageContext) -> dict[str, Any]:
    """Train with verl until the planned step, from the newest valid checkpoint if there is one.

    Call it in a process that is connected to Ray. Everything is written below ``ctx.stage_dir``: checkpoints in
    ``checkpoints/`` (shared by all attempts), the log, metrics and model of this attempt in its own folder. verl runs
    in a process of its own that does not outlive this call.

    Returns:
        ``{"model": artifact, "checkpoint": {"path", "step"}, "metrics": artifact, "step": n, "reward": {"first",
        "last", "best"}}``, plain JSON. It returns only when the planned step was reached, its checkpoint is whole, its
        losses are numbers and the model was exported.

    Raises:
        UserError: the stage cannot work as it is written (OVERRIDE_INVALID, ...), or not on this cluster (CAPACITY).
        VerlWorkflowError: CAPACITY when the cluster stays busy, TRAINING_FAILED, NO_PROGRESS, CHECKPOINT_INVALID or
            MODEL_INVALID; `retryable` says whether another attempt makes sense.
    """
    attempt = _prepare(spec, ctx)
    done = attempt.newest()
    if done is None or done.step < spec.steps:
        done = _train(attempt)
    _require_finite(attempt)
    attempt.ctx.report({"phase": "exporting", "step": done.step, "total": spec.steps})
    model = ctx.attempt_dir / "model"
    export(done, model, log=attempt.log)
    return attempt.outputs(done, model)


@dataclass(frozen=True, kw_only=True)
class _Attempt:
    spec: VerlStage
    ctx: StageContext
    chosen: Mapping[str, Any]
    checkpoint_dir: Path

    @property
    def log(self) -> Path:
        return self.ctx.attempt_dir / "log.txt"

    @property
    def metrics(self) -> Path:
        return self.ctx.attempt_dir / _metrics.FILE_NAME

    @property
    def roles(self) -> tuple[str, ...]:
        return ("actor", "critic") if self.spec.algorithm == "ppo" else ("actor",)

    def newest(self) -> _checkpoints.Checkpoint | None:
        """The newest checkpoint that can be resumed from."""
        return _checkpoints.newest_valid(self.checkpoint_dir, world_size=world_size(self.chosen), roles=self.roles)

    def tidied(self) -> _checkpoints.Checkpoint | None:
        """As `newest`, with all else out of the way; only while nothing trains."""
        return _checkpoints.tidy(
            self.checkpoint_dir,
            world_size=world_size(self.chosen),
            roles=self.roles,
            keep=self.spec.keep,
        )

    def rows(self) -> list[_metrics.Row]:
        """Metrics of all attempts so far, this one included."""
        folders = sorted((self.ctx.stage_dir / "attempts").iterdir())
        return _metrics.merge(folder / self.metrics.name for folder in folders if folder <= self.ctx.attempt_dir)

    def outputs(self, done: _checkpoints.Checkpoint, model: Path) -> dict[str, Any]:
        rows = [row for row in self.rows() if row.step <= done.step]
        merged = self.ctx.attempt_dir / "metrics.jsonl"
        _metrics.write(rows, merged)
        return {
            "model": Artifact.of(model).to_json(),
            "checkpoint": {"path": str(done.path), "step": done.step},
            "metrics": Artifact.of(merged).to_json(),
            "step": done.step,
            "reward": _metrics.rewards(rows),
        }


def _prepare(spec: VerlStage, ctx: StageContext) -> _Attempt:
    device = _cluster.cluster_device() if spec.device == "auto" else spec.device
    model, train, validation = (ctx.artifact(text) for text in (spec.model, spec.train, spec.validation))
    checkpoint_dir = (ctx.stage_dir / "checkpoints").absolute()
    chosen = settings(
        spec,
        Inputs(
            device=device,
            model=model.path,
            train=train.path,
            validation=validation.path,
            code_dir=ctx.code_dir,
            checkpoints=checkpoint_dir,
        ),
    )
    chosen = {key: _resolved(value, ctx) for key, value in chosen.items()}
    errors = check_settings(spec, chosen, train_rows=_rows(train.path), where=lambda path: ".".join((ctx.stage, *path)))
    if errors:
        raise errors[0] if len(errors) == 1 else UserErrors(errors)
    _try_reward(spec, ctx.code_dir, train.path)
    ctx.attempt_dir.mkdir(parents=True, exist_ok=True)
    checkpoint_dir.mkdir(parents=True, exist_ok=True)
    bind(
        checkpoint_dir,
        {
            "algorithm": spec.algorithm,
            "model": model.sha256,
            "train": train.sha256,
            "validation": validation.sha256,
            "world_size": world_size(chosen),
        },
    )
    _checkpoints.require_space(checkpoint_dir, model_bytes=model.bytes)
    return _Attempt(spec=spec, ctx=ctx, chosen=chosen, checkpoint_dir=checkpoint_dir)


def _try_reward(spec: VerlStage, code_dir: Path, train: Path) -> None:
    """A mistake in the reward is met here in a second, and by verl minutes after its start, between other errors."""
    from pyarrow import parquet as pq

    from verl_workflow.data import try_reward

    first = next(pq.ParquetFile(train).iter_batches(batch_size=1)).to_pylist()[0]
    row = {"extra_info": {}, "data_source": "", **first}
    if isinstance(row.get("reward_model"), Mapping) and "ground_truth" in row["reward_model"]:
        try_reward(spec.reward, code_dir, row)


def _train(attempt: _Attempt) -> _checkpoints.Checkpoint:
    ctx = attempt.ctx
    gpus = world_size(attempt.chosen)
    _cluster.require_fit(
        nodes=int(attempt.chosen["trainer.nnodes"]),
        gpus_per_node=int(attempt.chosen["trainer.n_gpus_per_node"]),
        cpus=cpus_needed(attempt.chosen),
    )
    with _cluster.training_lease(f"run {ctx.run_id}, stage {ctx.stage}", ctx.report):
        _cluster.wait_for_room(cpus_needed(attempt.chosen), gpus, ctx.report)
        # Only now: until the cluster is free, actors of an attempt that was killed may still be writing a checkpoint.
        start = attempt.tidied()
        code = _run(attempt, start)
    if failure := _failure(attempt, code, start):
        raise failure
    return _proven(attempt, start)


def _run(attempt: _Attempt, start: _checkpoints.Checkpoint | None) -> int:
    """Run verl's process to its end, showing progress; its exit code."""
    spec, ctx = attempt.spec, attempt.ctx
    command = [sys.executable, "-m", _ENTRY, str(ctx.attempt_dir)]
    environment = _write_launch(attempt, start)
    (ctx.attempt_dir / _failures.RESULT).unlink(missing_ok=True)
    watch = Watch(file=_metrics.MetricsFile(attempt.metrics), total=spec.steps, start=start.step if start else 0)
    ctx.report({"phase": "starting", "step": watch.step, "total": spec.steps})
    with ChildProcess(command, env=environment, log=attempt.log, cwd=ctx.attempt_dir) as child:
        while (code := child.wait(_POLL_SECONDS)) is None:
            if progress := watch.look(time.monotonic()):
                ctx.report(progress)
            if reason := watch.dead():
                raise _dead(attempt, reason)
            if reason := watch.stalled(time.monotonic()):
                raise VerlWorkflowError(
                    ErrorCode.NO_PROGRESS,
                    f"the training stands still: {reason}",
                    where=ctx.stage,
                    remedy=f"It was stopped and can be resumed. Last words of {attempt.log}:\n{tail(attempt.log, 20)}",
                    retryable=True,
                )
    if progress := watch.look(time.monotonic()):
        ctx.report(progress)
    return code


def _write_launch(attempt: _Attempt, start: _checkpoints.Checkpoint | None) -> dict[str, str]:
    """Write what the process reads; return its environment."""
    import ray

    platform = _cluster.verl_platform(str(attempt.chosen["trainer.device"]))
    variables = worker_variables(platform=platform, metrics=attempt.metrics, code_dir=attempt.ctx.code_dir)
    chosen = {
        **attempt.chosen,
        "ray_kwargs.ray_init.address": ray.get_runtime_context().gcs_address,
        **{f"ray_kwargs.ray_init.runtime_env.env_vars.{name}": value for name, value in variables.items()},
    }
    if start is not None:
        chosen |= {"trainer.resume_mode": "resume_path", "trainer.resume_from_path": str(start.path)}
    launch = {"supervisor": os.getpid(), "settings": chosen}
    (attempt.ctx.attempt_dir / "launch.json").write_text(json.dumps(launch, indent=1), encoding="utf-8")
    return driver_environment(variables)


def _failure(attempt: _Attempt, code: int, start: _checkpoints.Checkpoint | None) -> VerlWorkflowError | None:
    """What went wrong in verl's process, or None when it says that all went well."""
    try:
        result = json.loads((attempt.ctx.attempt_dir / _failures.RESULT).read_text(encoding="utf-8"))
    except FileNotFoundError:
        result = None
    if result is not None and result["ok"] and code == 0:
        return None
    if result is None or result["ok"]:
        how = f"was killed by signal {-code}" if code < 0 else f"ended with exit code {code} and left no result"
        kind = _failures.FailureClass.INFRASTRUCTURE
        what = f"the training process {how}"
    else:
        kind = _failures.FailureClass(result["class"])
        what = f"the training failed ({kind.value}): {_failures.headline(result['errors'])}"
    if kind in {_failures.FailureClass.UNKNOWN, _failures.FailureClass.USER}:
        raised = _failures.raised_by_user(tail(attempt.log, 1_000_000, 16 << 20), attempt.ctx.code_dir)
        if raised is not None:
            return UserError(
                ErrorCode.REWARD_INVALID,
                f"the training failed, as {raised}",
                where=attempt.ctx.stage,
                remedy="Let the reward return a finite number for whatever a model may reply.",
            )
    if kind is _failures.FailureClass.CHECKPOINT:
        if start is None:
            kind = _failures.FailureClass.UNKNOWN
        else:
            _checkpoints.quarantine(start)
    return VerlWorkflowError(
        ErrorCode.TRAINING_FAILED,
        what,
        where=attempt.ctx.stage,
        remedy=f"{_failures.advice(kind, what)} Last words of {attempt.log}:\n{tail(attempt.log, 20)}",
        retryable=kind.retryable,
    )


def _proven(attempt: _Attempt, start: _checkpoints.Checkpoint | None) -> _checkpoints.Checkpoint:
    """The final checkpoint, after proof that the planned step was reached and saved."""
    spec = attempt.spec
    _require_finite(attempt)
    reached = max((row.step for row in attempt.rows() if row.trained), default=0)
    # verl forgets the checkpoints of earlier attempts: only here are they pruned.
    done = attempt.tidied()
    if reached < spec.steps or done is None or done.step < spec.steps:
        begun = start.step if start else 0
        raise VerlWorkflowError(
            ErrorCode.NO_PROGRESS,
            f"verl ended without an error at step {reached} of {spec.steps} (begun at {begun}, "
            f"newest valid checkpoint: {done.step if done else 'none'})",
            where=attempt.ctx.stage,
            remedy=f"Look for what ended it. Last words of {attempt.log}:\n{tail(attempt.log, 20)}",
            # Going on from where it stopped helps only when it moved at all.
            retryable=reached > begun,
        )
    return done


def _require_finite(attempt: _Attempt) -> None:
    """verl passes over updates that are not finite and ends with success: the last step's numbers must be numbers."""
    trained = [row for row in attempt.rows() if row.trained]
    if trained and (bad := _metrics.non_finite(trained[-1])):
        raise _dead(attempt, f"{', '.join(bad)} is not finite at step {trained[-1].step}")


def _dead(attempt: _Attempt, reason: str) -> VerlWorkflowError:
    return VerlWorkflowError(
        ErrorCode.TRAINING_FAILED,
        f"the training is numerically dead: {reason}",
        where=attempt.ctx.stage,
        remedy=f"Lower the learning rate or the clip range, and start a new run. Its metrics: {attempt.metrics}",
    )


def _resolved(value: Any, ctx: StageContext) -> Any:
    """An override that refers to another stage's output: an artifact becomes its path."""
    found = ctx.value(value) if isinstance(value, str) else value
    return found["path"] if isinstance(found, Mapping) and "sha256" in found else found


def _rows(parquet: Path) -> int:
    from pyarrow import parquet as pq

    return int(pq.read_metadata(parquet).num_rows)
