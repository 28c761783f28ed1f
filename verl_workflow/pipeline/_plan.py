"""What a run would do: which stages run, which earlier results stand in, why, and what they need of the cluster."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from verl_workflow.errors import ErrorCode, UserError, VerlWorkflowError
from verl_workflow.pipeline._compile import MODEL_STEP, compile_plan, verify_artifacts
from verl_workflow.pipeline._definition import Definition, define
from verl_workflow.spec import DataStage, Document, VerlStage
from verl_workflow.storage import Store
from verl_workflow.workflow import Step


@dataclass(frozen=True, kw_only=True)
class PlanRow:
    """One step.

    Attributes:
        action: ``run``, ``reuse``, or ``unknown`` when it depends on results that do not exist yet.
        why: a clause. needs: logical resources by Ray's names, at their peak.
    """

    stage: str
    kind: str
    action: str
    why: str
    needs: Mapping[str, float]


@dataclass(frozen=True, kw_only=True)
class PlanReport:
    """Attributes: rows in order of execution; problems that would stop the run; resources of the cluster, if asked."""

    rows: tuple[PlanRow, ...]
    problems: tuple[UserError, ...]
    cluster: Mapping[str, float] | None

    def to_json(self) -> dict[str, Any]:
        return {
            "rows": [asdict(row) for row in self.rows],
            "problems": [problem.to_json() for problem in self.problems],
            "cluster": None if self.cluster is None else dict(self.cluster),
        }


def plan(
    document: Document,
    *,
    storage: str | None = None,
    address: str | None = None,
    connect_cluster: bool = False,
    reuse: bool = True,
) -> PlanReport:
    """Work out what `start` would do now. Writes nothing; asks a cluster only when told to.

    Raises:
        UserErrors: the pipeline could not be started at all.
        VerlWorkflowError(CLUSTER_UNREACHABLE): the cluster does not answer.
    """
    definition = define(document, storage=storage, reuse=reuse)
    cluster = _cluster_resources(address) if connect_cluster else None
    store = Store(definition.storage)
    known: dict[str, Any] = {}
    rows = []
    problems = []
    for step in compile_plan(definition, gpus=_has_accelerators(cluster or {})).in_order():
        needs = _needs(definition, step)
        action, why, value = _decide(store, step, known)
        if value is not None:
            known[step.name] = value
        rows.append(PlanRow(stage=step.name, kind=_kind(definition, step.name), action=action, why=why, needs=needs))
        if cluster is not None and action != "reuse":
            problems.extend(_missing(step.name, needs, cluster))
    return PlanReport(rows=tuple(rows), problems=tuple(problems), cluster=cluster)


def _decide(store: Store, step: Step, known: Mapping[str, Any]) -> tuple[str, str, Any]:
    if step.name == MODEL_STEP:
        return "run", "a model that was made before is found by its content and taken", None
    if step.key is None:
        return "run", "stages of this kind are run every time", None
    if any(name not in known for name in step.after if name != MODEL_STEP):
        waiting = ", ".join(name for name in step.after if name not in known and name != MODEL_STEP)
        return "unknown", f"depends on what {waiting} yields", None
    if MODEL_STEP in step.after:
        return "unknown", "depends on the model's digest, known once it has been made", None
    entry = store.get(f"cache/{step.key({name: known[name] for name in step.after})}.json")
    if entry is None:
        return "run", "no earlier result with the same spec, inputs, code and tool versions", None
    found = json.loads(entry)
    try:
        verify_artifacts(found["value"])
    except VerlWorkflowError as error:
        return "run", f"the earlier result of {found['run_id']} is not usable: {error}", None
    return "reuse", f"same spec, inputs, code and tool versions as in {found['run_id']}", found["value"]


def _kind(definition: Definition, name: str) -> str:
    return MODEL_STEP if name == MODEL_STEP else str(definition.pipeline.stage(name).kind)


def _needs(definition: Definition, step: Step) -> dict[str, float]:
    stage = None if step.name == MODEL_STEP else definition.pipeline.stage(step.name)
    if isinstance(stage, VerlStage):
        from verl_workflow.training import required_resources

        return dict(required_resources(stage))
    if isinstance(stage, DataStage):
        return {"CPU": 1.0}
    return {name: amount for name, amount in {"CPU": step.num_cpus, "GPU": step.num_gpus}.items() if amount}


def _has_accelerators(cluster: Mapping[str, float]) -> bool:
    return any(name.startswith("accelerator_type:") for name in cluster)


def _missing(name: str, needs: Mapping[str, float], cluster: Mapping[str, float]) -> list[UserError]:
    return [
        UserError(
            ErrorCode.CAPACITY,
            f"the stage needs {amount:g} {resource} and the cluster has {cluster.get(resource, 0):g}",
            where=name,
            remedy=f"Add nodes with {resource}, or ask for less in the stage.",
        )
        for resource, amount in needs.items()
        if cluster.get(resource, 0) < amount
    ]


def _cluster_resources(address: str | None) -> dict[str, float]:
    import ray

    from verl_workflow.pipeline._cluster import connect

    connect(address)
    try:
        return {
            name: float(amount)
            for name, amount in ray.cluster_resources().items()
            if not name.startswith(("node:", "memory", "object_store"))
        }
    finally:
        ray.shutdown()
