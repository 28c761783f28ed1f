"""The promote stage."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from verl_workflow.artifacts import Artifact
from verl_workflow.errors import ErrorCode, FencedError, UserError, VerlWorkflowError
from verl_workflow.gates import evaluate_gate
from verl_workflow.registry._lineage import read_lineage, run_state
from verl_workflow.registry._records import AliasRecord, ModelVersion
from verl_workflow.registry._registry import Registry
from verl_workflow.storage import Store

if TYPE_CHECKING:
    from verl_workflow.pipeline import StageContext
    from verl_workflow.spec import PromoteStage

# The alias an evaluation takes its opponent from.
_EVALUATED_ALIAS = "champion"
_FIGURES = ("candidate", "champion", "difference", "rows")
_NOT_FIGURES = ("artifact", "rows", "registry", "version")


def run_promote_stage(spec: PromoteStage, ctx: StageContext) -> dict[str, Any]:
    """Register the evaluated model and move the alias to it, when the gate holds.

    Returns:
        ``promoted``, ``reason`` (with the figures), ``version`` and ``model``. When the gate does not hold nothing is
        registered, and both are None. When the alias points to the same bytes already, they are that version's, and
        nothing is registered either.

    Guarantees:
        At most one version and one move for a run and stage, however often it is tried. The alias `champion` moves only
        if it still points to the version that the evaluation's candidate was compared with.

    Raises:
        UserError: GATE_INVALID, MODEL_INVALID, or SPEC_INVALID when `evaluation` is not an evaluate stage's output.
        VerlWorkflowError(REGISTRY_CONFLICT): the alias was moved meanwhile, or its present version was not evaluated.
        FencedError: another driver has taken the run over.
    """
    evaluation = _evaluation(spec, ctx)
    values = {name: evaluation.get(name) for name in _FIGURES}
    holds = evaluate_gate(spec.gate, values)
    told = f"{spec.gate.strip()} ({_told(values)})"
    if not holds:
        return _outcome(False, f"the gate does not hold: {told}", None)
    store = Store(ctx.storage)
    registry = Registry(store, ctx.root)
    candidate = Artifact.from_json(evaluation["model"])
    history = registry.history(spec.registry, spec.alias)
    for move in history:
        if (move.run, move.stage) == (ctx.run_id, ctx.stage):
            # An earlier attempt got this far, and whatever came after it is not to be undone.
            return _outcome(True, f"the gate holds: {told}", registry.resolve(spec.registry, move.version))
    before = history[-1] if history else None
    if before is not None:
        present = registry.resolve(spec.registry, before.version)
        if present.artifact.sha256 == candidate.sha256:
            return _outcome(False, f"{spec.alias} points to the same bytes already, {present.version}", present)
    _check_evaluated(spec, evaluation, before)
    ctx.report({"doing": "register", "model": spec.registry})
    version = registry.register(
        spec.registry, candidate, read_lineage(store, ctx, evaluation), {**values, "gate": spec.gate}
    )
    _check_not_fenced(store, ctx)
    registry.set_alias(
        spec.registry,
        spec.alias,
        version.version,
        before.number if before is not None else None,
        run=ctx.run_id,
        stage=ctx.stage,
        epoch=ctx.epoch,
    )
    return _outcome(True, f"the gate holds: {told}", version)


def _outcome(promoted: bool, reason: str, version: ModelVersion | None) -> dict[str, Any]:
    return {
        "promoted": promoted,
        "reason": reason,
        "version": None if version is None else version.version,
        "model": None if version is None else version.artifact.to_json(),
    }


def _evaluation(spec: PromoteStage, ctx: StageContext) -> Mapping[str, Any]:
    found = ctx.value(spec.evaluation)
    needed = ("model", "candidate", "champion", "rows")
    missing = [name for name in needed if not isinstance(found, Mapping) or name not in found]
    if missing:
        raise UserError(
            ErrorCode.SPEC_INVALID,
            f"the evaluation has no {', '.join(missing)}",
            where=f"{spec.name}.evaluation",
            value=spec.evaluation,
            remedy="Refer to a whole evaluate stage, such as ${evaluate}.",
        )
    assert isinstance(found, Mapping)
    return found


def _check_evaluated(spec: PromoteStage, evaluation: Mapping[str, Any], before: AliasRecord | None) -> None:
    """Raise unless the champion about to be replaced is the one the candidate was compared with."""
    if spec.alias != _EVALUATED_ALIAS:
        return
    opponent = evaluation["champion"]
    met = None
    if opponent is not None and opponent.get("registry") == spec.registry:
        met = opponent.get("version")
    present = before.version if before is not None else None
    if met == present:
        return
    compared = f"was compared with {met}" if met else f"was not compared with any version of {spec.registry}"
    raise VerlWorkflowError(
        ErrorCode.REGISTRY_CONFLICT,
        f"{spec.registry}'s {spec.alias} is {present or 'not set'}, but the candidate {compared}",
        where=spec.name,
        remedy=f"Start a new run, with `champion: {spec.registry}` in its evaluate stage; training is re-used.",
    )


def _check_not_fenced(store: Store, ctx: StageContext) -> None:
    state = run_state(store, ctx.run_id)
    if state is not None and state.epoch > ctx.epoch:
        raise FencedError(
            ErrorCode.FENCED,
            f"another driver has taken the run over (epoch {state.epoch}, this one's is {ctx.epoch})",
            where=ctx.run_id,
            remedy="Nothing is to be done: the later driver goes on.",
        )


def _told(values: Mapping[str, Any]) -> str:
    """The figures in a line: ``candidate: score 0.9; champion: none; rows 64``."""
    parts = []
    for name, figures in values.items():
        if isinstance(figures, Mapping):
            label = f"{name} {figures['version']}" if figures.get("version") else name
            shown = [
                f"{key} {value:.4g}"
                for key, value in figures.items()
                if key not in _NOT_FIGURES and isinstance(value, (int, float)) and not isinstance(value, bool)
            ]
            parts.append(f"{label}: {', '.join(shown)}")
        elif name == "champion":
            parts.append("champion: none")
        elif figures is not None:
            parts.append(f"{name} {figures}")
    return "; ".join(parts)
