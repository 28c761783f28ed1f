"""The story of one attempt at a verl stage."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from verl_workflow.errors import UserErrors
from verl_workflow.spec._training import VerlStage
from verl_workflow.trackers import behind, mirrored
from verl_workflow.training import _checkpoints, _cluster, _metrics
from verl_workflow.training._attempt import RESULT, Attempt, roles_of, write_launch
from verl_workflow.training._check import check_settings
from verl_workflow.training._disk import DiskWatch
from verl_workflow.training._environment import driver_environment
from verl_workflow.training._export import export
from verl_workflow.training._extend import go_on
from verl_workflow.training._guards import GuardedRows, in_force
from verl_workflow.training._handover import ask, asked_by_sigterm
from verl_workflow.training._history import Outcome, outcomes
from verl_workflow.training._identity import bind, bound_settings
from verl_workflow.training._job import DrainWatch
from verl_workflow.training._layout import needed
from verl_workflow.training._names import StageName
from verl_workflow.training._outcome import AttemptFailed, no_room, proven, require_finite, require_success, stuck
from verl_workflow.training._overrides import Inputs, settings, world_size
from verl_workflow.training._owner import claim
from verl_workflow.training._places import Places, kept_for_retries
from verl_workflow.training._process import ChildProcess
from verl_workflow.training._reaper import reap
from verl_workflow.training._record import Signs, Tally, recorded, require_attempts_left
from verl_workflow.training._retention import Retention, handed_on
from verl_workflow.training._retry import changes_after, longest_pause
from verl_workflow.training._stacks import frames_in, keep_stacks
from verl_workflow.training._warm import warm_nodes
from verl_workflow.training._watch import Watch
from verl_workflow.warm import warm_command

if TYPE_CHECKING:
    # The pipeline runs stages; importing it here would close the circle.
    from verl_workflow.pipeline._context import StageContext

_POLL_SECONDS = 0.5
# As long as what it would spare.
_WARM_SECONDS = 30.0
# For a driver to begin the next attempt, beside the pause before it.
_HELD_SECONDS = 120.0
_ENTRY = "verl_workflow.training.entry"


def run_verl_stage(spec: VerlStage, ctx: StageContext) -> dict[str, Any]:
    """Train with verl until the planned step, from the newest valid checkpoint if there is one.

    Call it in a process that is connected to Ray. Everything is written below ``ctx.stage_dir``: checkpoints in
    ``checkpoints/`` (shared by all attempts), the log, metrics and model of this attempt in its own folder. verl runs
    in a process of its own that does not outlive this call.

    Returns:
        ``{"model": artifact, "checkpoint": {"path", "step"}, "best": None or {"path", "step", "metric", "value"},
        "metrics": artifact, "step": n, "reward": {"first", "last", "best"}, "extended": None or {"run", "stage",
        "step"}}``, plain JSON. It returns only when the planned step was reached, its checkpoint is whole, its losses
        are numbers and the model was exported.

    Raises:
        UserError: the stage cannot work as it is written (OVERRIDE_INVALID, ...), or not on this cluster (CAPACITY).
        VerlWorkflowError: CAPACITY when the cluster stays busy, TRAINING_FAILED, NO_PROGRESS, CHECKPOINT_INVALID or
            MODEL_INVALID; `retryable` says whether another attempt makes sense.
    """
    history = outcomes(ctx.stage_dir)
    require_attempts_left(spec, history, ctx)
    attempt = _prepare(spec, ctx, history)
    lease = longest_pause(spec, len(history)) + _HELD_SECONDS
    with (
        kept_for_retries(StageName.of(ctx), attempt.owner, lease=lease) as places,
        recorded(attempt, history) as tally,
    ):
        done = attempt.newest()
        if done is None or done.step < spec.steps:
            with mirrored(ctx.stage_dir, attempt.facts, driver_environment({})):
                done = _train(attempt, tally, places)
            tally.warnings += behind(ctx.stage_dir, attempt.facts)
            # The rest needs no GPU.
            places.release()
        require_finite(attempt)
        ctx.report({"phase": "exporting", "step": done.step, "total": spec.steps})
        model, best = ctx.attempt_dir / "model", attempt.best()
        export(handed_on(spec, done, best, tally.warnings.append), model, log=attempt.log)
        return attempt.outputs(done, best, model, tally.warnings)


def _prepare(spec: VerlStage, ctx: StageContext, history: Sequence[Outcome]) -> Attempt:
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
    written = {key: _resolved(value, ctx) for key, value in chosen.items()}
    changes = changes_after(spec, history, written)
    chosen = {**written, **changes}
    errors = check_settings(spec, chosen, train_rows=_rows(train.path), where=lambda path: ".".join((ctx.stage, *path)))
    if errors:
        raise errors[0] if len(errors) == 1 else UserErrors(errors)
    _try_reward(spec, ctx.code_dir, train.path)
    ctx.attempt_dir.mkdir(parents=True, exist_ok=True)
    checkpoint_dir.mkdir(parents=True, exist_ok=True)
    identity = {
        "algorithm": spec.algorithm,
        "model": model.sha256,
        "train": train.sha256,
        "validation": validation.sha256,
        "world_size": world_size(chosen),
        **bound_settings(chosen),
    }
    bind(checkpoint_dir, identity)
    go_on(spec, ctx.storage, checkpoint_dir, identity, roles_of(spec))
    _checkpoints.require_space(checkpoint_dir, model_bytes=model.bytes)
    return Attempt(
        spec=spec, ctx=ctx, written=written, changes=changes, identity=identity, checkpoint_dir=checkpoint_dir
    )


def _try_reward(spec: VerlStage, code_dir: Path, train: Path) -> None:
    """A mistake in the reward is met here in a second, and by verl minutes after its start, between other errors."""
    from pyarrow import parquet as pq

    from verl_workflow.data import try_reward

    first = next(pq.ParquetFile(train).iter_batches(batch_size=1)).to_pylist()[0]
    row = {"extra_info": {}, "data_source": "", **first}
    if isinstance(row.get("reward_model"), Mapping) and "ground_truth" in row["reward_model"]:
        try_reward(spec.reward, code_dir, row)


def _train(attempt: Attempt, tally: Tally, places: Places) -> _checkpoints.Checkpoint:
    ctx, placement, stage = attempt.ctx, attempt.spec.placement, StageName.of(attempt.ctx)
    need = needed(attempt.chosen, placement)
    if not placement.autoscaled:
        _cluster.require_fit(need, _cluster.cluster_nodes())
    tally.warnings += reap(stage, attempt.owner, storage=ctx.storage)
    with _cluster.training_lease(str(stage), ctx.report, timeout=placement.turn, stage=stage):
        groups = places.reserve(need, ctx.report, timeout=placement.room)
        claim(attempt.checkpoint_dir, attempt.owner)
        # Only now: until the cluster is free, actors of an attempt that was killed may still be writing a checkpoint.
        start, broken = attempt.tidied()
        tally.warnings += broken
        tally.start = start.step if start else 0
        try:
            with tally.training():
                code = _run(attempt, start, tally, groups)
            require_success(attempt, code, start, drained=tally.drained)
        except AttemptFailed as failed:
            if failed.back_to is not None:
                attempt.require_owner()
                _checkpoints.set_aside(attempt.checkpoint_dir, since=failed.back_to)
            raise
    return proven(attempt, start)


def _run(
    attempt: Attempt, start: _checkpoints.Checkpoint | None, tally: Tally, groups: Mapping[str, Sequence[str]]
) -> int:
    """Run verl's process to its end in the placement `groups`, showing progress; its exit code."""
    spec, ctx = attempt.spec, attempt.ctx
    words, workers = ["-m", _ENTRY, str(ctx.attempt_dir)], None
    command = [sys.executable, *words]
    if spec.warm_start and (folder := warm_nodes()) is not None:
        command, workers = warm_command(folder, words, patience=_WARM_SECONDS)
    environment = write_launch(attempt, start, groups=groups, workers=workers)
    (ctx.attempt_dir / RESULT).unlink(missing_ok=True)
    guarded = GuardedRows(
        guards=in_force(spec.guards),
        start=tally.start,
        earlier=[row for row in attempt.rows() if row.trained and row.step <= tally.start],
    )
    file = _metrics.MetricsFile(attempt.metrics)
    watch = Watch(file=file, total=spec.steps, start=tally.start, guarded=guarded, deadlines=spec.deadlines)
    signs = Signs(watch=watch, tally=tally, report=ctx.report)
    every = int(attempt.chosen["trainer.save_freq"])
    disk = DiskWatch(root=attempt.checkpoint_dir, every=every, total=spec.steps)
    retention = Retention(root=attempt.checkpoint_dir, prune=attempt.prune)
    process = ChildProcess(command, env=environment, log=attempt.log, cwd=ctx.attempt_dir)
    with process as child, asked_by_sigterm(ctx.attempt_dir):
        leaving = DrainWatch(namespace=attempt.namespace)
        while (code := child.wait(_POLL_SECONDS)) is None:
            if signs.look(time.monotonic()):
                retention.after(watch.step)
            if lacking := disk.short_of(watch.step):
                raise no_room(lacking)
            if nodes := leaving.draining():
                tally.drained = nodes
                ask(ctx.attempt_dir)
            if reason := watch.stalled(time.monotonic()):
                ctx.report({**watch.progress(), "phase": "stuck: its stacks are being kept"})
                stacks = keep_stacks(ctx.attempt_dir / "stacks", attempt.namespace, str(attempt.metrics))
                raise stuck(attempt, reason, frames_in(stacks, ctx.code_dir))
    signs.look(time.monotonic())
    return code


def _resolved(value: Any, ctx: StageContext) -> Any:
    """An override that refers to another stage's output: an artifact becomes its path."""
    found = ctx.value(value) if isinstance(value, str) else value
    return found["path"] if isinstance(found, Mapping) and "sha256" in found else found


def _rows(parquet: Path) -> int:
    from pyarrow import parquet as pq

    return int(pq.read_metadata(parquet).num_rows)
