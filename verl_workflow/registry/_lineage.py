"""Where a candidate comes from, read from its run's journal and the outputs at hand."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from verl_workflow.errors import ErrorCode, UserError
from verl_workflow.registry._records import Lineage
from verl_workflow.spec._fields import REFERENCE
from verl_workflow.storage import Store

if TYPE_CHECKING:
    from verl_workflow.pipeline import StageContext
    from verl_workflow.workflow import RunState


def read_lineage(store: Store, ctx: StageContext, evaluation: Mapping[str, Any]) -> Lineage:
    """The lineage of the evaluation's candidate; what is not recorded anywhere stays empty."""
    state = run_state(store, ctx.run_id)
    definition = state.definition if state is not None else {}
    outputs = dict(ctx.inputs)
    if state is not None:
        outputs = {name: step.value for name, step in state.steps.items() if step.value is not None} | outputs
    if ctx.model is not None:
        outputs.setdefault("model", ctx.model.to_json())
    pipeline = definition.get("pipeline") or {}
    data, parent, origin = _training(pipeline, outputs, evaluation["model"]["sha256"])
    answered = _digest(evaluation.get("data"))
    champion = evaluation.get("champion") or {}
    return Lineage(
        run=ctx.run_id,
        stage=ctx.stage,
        epoch=ctx.epoch,
        attempt=ctx.attempt,
        pipeline=pipeline.get("name"),
        config=hashlib.sha256(json.dumps(pipeline, sort_keys=True).encode()).hexdigest() if pipeline else None,
        code=definition.get("code_digest"),
        data=data | ({"evaluation": answered} if answered else {}),
        parent=parent,
        extends=None if origin is None else f"{origin['run']}/{origin['stage']}",
        champion=champion.get("version"),
        versions=dict(definition.get("versions") or {}),
    )


def run_state(store: Store, run_id: str) -> RunState | None:
    """The run as its journal tells it, None when the store knows no such run."""
    from verl_workflow.workflow import read_run

    try:
        return read_run(store, run_id)
    except UserError as error:
        if error.code is not ErrorCode.RUN_UNKNOWN:
            raise
        return None


def _training(
    pipeline: Mapping[str, Any], outputs: Mapping[str, Any], sha256: str
) -> tuple[dict[str, str], str | None, Mapping[str, Any] | None]:
    """Of the verl stage whose model this is: digests of its data and of the model at the start, and what it extends."""
    for stage in pipeline.get("stages") or []:
        made = outputs.get(stage["name"])
        if stage["kind"] == "verl" and isinstance(made, Mapping) and _digest(made.get("model")) == sha256:
            found = {name: _digest(_referred(stage[name], outputs)) for name in ("train", "validation")}
            data = {name: digest for name, digest in found.items() if digest}
            return data, _digest(_referred(stage["model"], outputs)), made.get("extended")
    return {}, None, None


def _referred(text: str, outputs: Mapping[str, Any]) -> Any:
    match = REFERENCE.fullmatch(text)
    if match is None:
        return None
    found: Any = outputs.get(match.group(1))
    for part in match.group(2).split(".") if match.group(2) else []:
        found = found.get(part) if isinstance(found, Mapping) else None
    return found


def _digest(value: Any) -> str | None:
    return value.get("sha256") if isinstance(value, Mapping) else None
