"""Going on from a finished run's last checkpoint: what may be extended, and how its checkpoint is taken over."""

from __future__ import annotations

import errno
import json
import os
import shutil
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from verl_workflow.errors import ErrorCode, UserError, VerlWorkflowError
from verl_workflow.outline import StageOutline, outline_of
from verl_workflow.spec._training import VerlStage
from verl_workflow.storage import Store
from verl_workflow.training import _checkpoints
from verl_workflow.training._identity import difference, recorded, way_on
from verl_workflow.training._owner import saving_folder
from verl_workflow.workflow import RunState, RunStatus, read_run

_RECORD = "extends.json"
# The state of verl's data loader, which the checkpoint holds, means other rows when one of these is another.
_ORDER = ("batch_size", "max_prompt_length", "seed")
_NO_LINK = frozenset({errno.EXDEV, errno.EPERM, errno.EOPNOTSUPP, errno.EMLINK})


@dataclass(frozen=True, kw_only=True)
class Extended:
    """A finished training that another goes on from.

    Attributes:
        run, stage: of whom it was asked. step: that it reached. checkpoint: verl's folder of that step.
        content: digests of what it has made, to tell it from one that had the same id.
    """

    run: str
    stage: str
    step: int
    checkpoint: Path
    content: Mapping[str, Any]

    def to_json(self) -> dict[str, Any]:
        return {"run": self.run, "stage": self.stage, "step": self.step}


def extended(spec: VerlStage, storage: str) -> Extended | None:
    """The training that the stage goes on from; None when it starts from its model.

    Reads the other run's journal; its files are looked at by `go_on`.

    Raises:
        UserError: RUN_UNKNOWN; SPEC_INVALID when that run has no such stage, has not finished it, went as far already,
            or took its rows in another order.
    """
    if not spec.extends:
        return None
    run, _, other = spec.extends.partition("/")
    where = f"{spec.name}.extends"
    state = _run(run, storage, where)
    stage = _stage(spec, state, other, where)
    step = state.steps.get(stage.name)
    value = step.value if step is not None else None
    if step is None or not isinstance(value, Mapping) or "checkpoint" not in value:
        status = "waiting" if step is None else "failed" if value is not None else step.status.value
        remedy = "Wait for it." if state.status is RunStatus.RUNNING else f"Finish it with: verl-workflow resume {run}"
        what = f"only a finished training can be extended, and {stage.name} of {run} is {status}"
        raise UserError(ErrorCode.SPEC_INVALID, what, where=where, value=spec.extends, remedy=remedy)
    reached = int(value["checkpoint"]["step"])
    if spec.steps <= reached:
        raise UserError(
            ErrorCode.SPEC_INVALID,
            f"{stage.name} of {run} has reached step {reached}, and {spec.steps} steps are planned in all",
            where=f"{spec.name}.steps",
            value=spec.steps,
            remedy=f"Set steps above {reached}: the steps of the earlier run count.",
        )
    for name in _ORDER:
        before, now = stage.fields.get(name), getattr(spec, name)
        if before != now:
            what = f"{stage.name} of {run} was trained with {name} {before}, and so its rows are in another order"
            remedy = f"Set {name} to {before}; or start from its model, with `model:` and without `extends:`."
            raise UserError(ErrorCode.SPEC_INVALID, what, where=f"{spec.name}.{name}", value=now, remedy=remedy)
    return Extended(
        run=run,
        stage=stage.name,
        step=reached,
        checkpoint=Path(value["checkpoint"]["path"]),
        content={name: value[name]["sha256"] for name in ("model", "metrics")},
    )


def go_on(
    spec: VerlStage, storage: str, checkpoint_dir: Path, identity: Mapping[str, Any], roles: Sequence[str]
) -> None:
    """Put the checkpoint that the stage extends into its own folder, unless there is one to resume from already.

    Files are linked where the file system can, and copied elsewhere: nothing of the earlier run is ever written to. The
    checkpoint appears whole or not at all.

    Args:
        checkpoint_dir: of the stage. identity: what it trains, as for `bind`.

    Raises:
        UserError: as `extended`; CHECKPOINT_INVALID when the checkpoint is not whole any more, or of another model,
            data or world size.
        VerlWorkflowError(STORAGE): it cannot be copied.
    """
    bound: dict[str, Any] = {"world_size": int(identity["world_size"]), "roles": roles, "identity": identity}
    if not spec.extends or _checkpoints.newest_valid(checkpoint_dir, **bound) is not None:
        return
    found = extended(spec, storage)
    assert found is not None, "the stage extends something"
    _require_same(found, identity)
    original = _checkpoints.Checkpoint(step=found.step, path=found.checkpoint)
    if why := _checkpoints.fault(original, **bound):
        raise UserError(
            ErrorCode.CHECKPOINT_INVALID,
            f"the last checkpoint of {found.stage} of {found.run} cannot be resumed from: {why}",
            where=str(found.checkpoint),
            remedy=f"Restore it. {way_on(found.checkpoint.parent)}",
        )
    _take_over(found, checkpoint_dir)


def origin(checkpoint_dir: Path) -> dict[str, Any] | None:
    """What the training in this folder has gone on from: ``run``, ``stage`` and ``step``; None for the model."""
    try:
        found = json.loads((checkpoint_dir / _RECORD).read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    assert isinstance(found, dict)
    return found


def _run(run: str, storage: str, where: str) -> RunState:
    try:
        return read_run(Store(storage), run, progress=False)
    except UserError as error:
        what = "there is no run of this id to extend"
        remedy = error.remedy if error.remedy.startswith("Did you mean") else "`verl-workflow list` shows the runs."
        raise UserError(ErrorCode.RUN_UNKNOWN, what, where=where, value=run, remedy=remedy) from error


def _stage(spec: VerlStage, state: RunState, named: str, where: str) -> StageOutline:
    """The stage of that run: the one named, the member of the same combination, or the one of the same name."""
    stages = {each.name: each for each in outline_of(state).stages if each.kind == "verl"}
    name = named or spec.name
    if not named and spec.member is not None:
        member = spec.member.model_dump(mode="json")
        name = next((each for each, stage in stages.items() if stage.fields.get("member") == member), "")
    if name not in stages:
        wanted = f"member with {dict(spec.member.values)}" if not named and spec.member else f"verl stage {name}"
        remedy = f"It has: {', '.join(stages) or 'no verl stage'}. Name one: extends: {state.run_id}/STAGE."
        what = f"the run {state.run_id} has no {wanted}"
        raise UserError(ErrorCode.SPEC_INVALID, what, where=where, value=spec.extends, remedy=remedy)
    return stages[name]


def _require_same(found: Extended, identity: Mapping[str, Any]) -> None:
    folder = found.checkpoint.parent
    if other := difference(recorded(folder), identity):
        raise UserError(
            ErrorCode.CHECKPOINT_INVALID,
            f"{found.stage} of {found.run} was trained with {other}",
            where=str(folder),
            remedy=f"Extend it with what it was trained with. {way_on(folder)}",
        )


def _take_over(found: Extended, checkpoint_dir: Path) -> None:
    target = checkpoint_dir / found.checkpoint.name
    # What a kill leaves there is half a save, and removed as such.
    saving = saving_folder(checkpoint_dir, f"extended-{uuid.uuid4().hex[:8]}")
    try:
        shutil.copytree(found.checkpoint, saving / target.name, copy_function=_link)
        if target.exists():
            _checkpoints.quarantine(_checkpoints.Checkpoint(step=found.step, path=target))
        # First, so that a checkpoint is never there without it.
        (checkpoint_dir / _RECORD).write_text(json.dumps(found.to_json()), encoding="utf-8")
        (saving / target.name).rename(target)
    except (OSError, shutil.Error) as error:
        raise VerlWorkflowError(
            ErrorCode.STORAGE,
            f"the checkpoint that is extended cannot be copied: {error}",
            where=str(found.checkpoint),
            remedy="Free some space, or see whether the folder can be read.",
            retryable=True,
        ) from error
    finally:
        shutil.rmtree(saving, ignore_errors=True)


def _link(source: str, target: str) -> None:
    """A second name for the same bytes, which nobody changes: verl writes each checkpoint to files of its own."""
    try:
        os.link(source, target)
    except OSError as error:
        if error.errno not in _NO_LINK:
            raise
        shutil.copy2(source, target)
