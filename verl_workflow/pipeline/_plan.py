"""What a run would do: which stages run, which earlier results stand in, why, and what they need of the cluster."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from typing import Any

from verl_workflow.errors import ErrorCode, UserError, VerlWorkflowError
from verl_workflow.outline import outline_of
from verl_workflow.pipeline._changes import changes
from verl_workflow.pipeline._compile import MODEL_STEP, compile_plan, inputs_of, verify_artifacts
from verl_workflow.pipeline._definition import Definition, check_extended, define
from verl_workflow.spec import DataStage, Document, VerlStage
from verl_workflow.storage import Store
from verl_workflow.workflow import RunState, RunStatus, Step, list_runs, read_earlier


@dataclass(frozen=True, kw_only=True)
class PlanRow:
    """One step.

    Attributes:
        action: ``run``, ``reuse``, or ``unknown`` when it depends on results that do not exist yet.
            Why a stage is ``unknown`` names the result that stands in should its inputs be those of the last run.
        why: a clause. needs: logical resources by Ray's names, at their peak.
        values: the combination of the matrix that a member stands for.
    """

    stage: str
    kind: str
    action: str
    why: str
    needs: Mapping[str, float]
    values: Mapping[str, Any] = field(default_factory=dict)


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
    cluster, nodes = _cluster(address) if connect_cluster else (None, [])
    foresight = _Foresight(store=Store(definition.storage), definition=definition)
    rows = []
    problems = check_extended(definition)
    for step in compile_plan(definition, gpus=_has_accelerators(cluster or {})).in_order():
        needs = _needs(definition, step)
        action, why = foresight.decide(step)
        kind, values = _kind(definition, step.name), _values(definition, step.name)
        rows.append(PlanRow(stage=step.name, kind=kind, action=action, why=why, needs=needs, values=values))
        if cluster is not None and action != "reuse":
            problems.extend(_missing(definition, step, needs, cluster, nodes))
    return PlanReport(rows=tuple(rows), problems=tuple(problems), cluster=cluster)


@dataclass
class _Foresight:
    """What each step will do, told in order of execution.

    A stage that runs every time has no result yet; what it yielded in the pipeline's last run is assumed, and said.
    """

    store: Store
    definition: Definition
    known: dict[str, Any] = field(default_factory=dict)
    assumed: dict[str, frozenset[str]] = field(default_factory=dict)

    def decide(self, step: Step) -> tuple[str, str]:
        """The step's action, and why."""
        if step.key is None:
            self._assume(step.name)
            if step.name == MODEL_STEP:
                return "run", "it is made, or found by its content if it was made before"
            return "run", "stages of this kind are run every time"
        inputs = sorted(inputs_of(self.definition, self.definition.pipeline.stage(step.name)))
        missing = [name for name in inputs if name not in self.known]
        if missing:
            return "unknown", f"depends on what {', '.join(missing)} will yield"
        assumed = frozenset[str]().union(*(self.assumed[name] for name in inputs))
        try:
            key = step.key({name: self.known[name] for name in inputs})
        except (LookupError, TypeError, AttributeError) as error:
            # Results are taken as they are recorded, and need not be what the stage refers to.
            return "run", f"what {', '.join(inputs)} yielded lacks what the stage refers to ({error!r})"
        except UserError as error:
            # It is among the plan's problems.
            return "run", error.what
        origin = ""
        try:
            found = read_earlier(self.store, key)
            if found is None:
                return "run", f"no earlier result with the same spec, inputs, code and tool versions{self._since(step)}"
            origin = f" of {found.run_id}"
            verify_artifacts(found.value)
        except (VerlWorkflowError, OSError) as error:
            return "run", f"the earlier result{origin} is not usable: {error}"
        self.known[step.name], self.assumed[step.name] = found.value, assumed
        if assumed:
            names = " and ".join(sorted(assumed))
            return "unknown", f"re-used from {found.run_id} if it gets the same from {names} as in {self._last_id}"
        return "reuse", f"same spec, inputs, code and tool versions as in {found.run_id}"

    def _since(self, step: Step) -> str:
        """What has changed since the pipeline's last run, as a clause to add."""
        if self._last is None:
            return ""
        try:
            before = Definition.from_json(self._last.definition)
        except VerlWorkflowError:
            # Of another version's format: it has nothing to compare with.
            return ""
        found = changes(self.definition, before, step.name) or "something that its settings or inputs refer to"
        return f"; different from {self._last_id}: {found}"

    def _assume(self, name: str) -> None:
        if self._last is None or name not in self._last.steps:
            return
        try:
            value = self._last.steps[name].value
        except VerlWorkflowError as error:
            if error.code is not ErrorCode.JOURNAL_DAMAGED:
                raise
            # Nothing can be foreseen from a value that is gone; what stands behind it is said to be unknown.
            return
        self.known[name], self.assumed[name] = value, frozenset({name})

    @property
    def _last_id(self) -> str:
        return "" if self._last is None else self._last.run_id

    @cached_property
    def _last(self) -> RunState | None:
        """The run of this pipeline that succeeded last; one whose record is damaged does not count."""
        ended = [
            (state.ended_at or 0.0, state)
            for state in list_runs(self.store)
            if state.status is RunStatus.SUCCEEDED and _pipeline_name(state) == self.definition.pipeline.name
        ]
        return max(ended, key=lambda pair: pair[0])[1] if ended else None


def _pipeline_name(state: RunState) -> str | None:
    """None for a run of something that is no pipeline."""
    try:
        return outline_of(state).pipeline
    except VerlWorkflowError:
        return None


def _kind(definition: Definition, name: str) -> str:
    return MODEL_STEP if name == MODEL_STEP else str(definition.pipeline.stage(name).kind)


def _values(definition: Definition, name: str) -> dict[str, Any]:
    member = None if name == MODEL_STEP else getattr(definition.pipeline.stage(name), "member", None)
    return {} if member is None else dict(member.values)


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


def _missing(
    definition: Definition, step: Step, needs: Mapping[str, float], cluster: Mapping[str, float], nodes: Sequence[Any]
) -> list[UserError]:
    stage = None if step.name == MODEL_STEP else definition.pipeline.stage(step.name)
    if isinstance(stage, VerlStage):
        from verl_workflow.training import lacking_resources

        lacking = lacking_resources(stage, nodes)
        remedy = "Add nodes, ask for less, or say `placement: {autoscaled: true}` if nodes come by themselves."
        what = f"the training does not fit on the cluster: {lacking}"
        return [UserError(ErrorCode.CAPACITY, what, where=step.name, remedy=remedy)] if lacking else []
    return [
        UserError(
            ErrorCode.CAPACITY,
            f"the stage needs {amount:g} {resource} and the cluster has {cluster.get(resource, 0):g}",
            where=step.name,
            remedy=f"Add nodes with {resource}, or ask for less in the stage.",
        )
        for resource, amount in needs.items()
        if cluster.get(resource, 0) < amount
    ]


def _cluster(address: str | None) -> tuple[dict[str, float], Sequence[Any]]:
    """The cluster's resources in all, and its nodes."""
    import ray

    from verl_workflow.pipeline._cluster import connect
    from verl_workflow.training import cluster_nodes

    connect(address)
    try:
        resources = {
            name: float(amount)
            for name, amount in ray.cluster_resources().items()
            if not name.startswith(("node:", "memory", "object_store"))
        }
        return resources, cluster_nodes()
    finally:
        ray.shutdown()
