"""Pipeline -> durable plan: a step for each stage, and one for the model they start from."""

from __future__ import annotations

import hashlib
import inspect
import json
import os
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from verl_workflow.artifacts import Artifact
from verl_workflow.errors import ErrorCode, UserError, VerlWorkflowError
from verl_workflow.pipeline._choose import choose
from verl_workflow.pipeline._context import StageContext
from verl_workflow.pipeline._definition import Definition
from verl_workflow.pipeline._tolerance import failure_of, passed_over, tolerant
from verl_workflow.spec import (
    ChooseStage,
    DataStage,
    EvaluateStage,
    PromoteStage,
    PythonStage,
    Stage,
    VerlStage,
)
from verl_workflow.spec._fields import REFERENCE
from verl_workflow.spec._stage import MatrixStage
from verl_workflow.workflow import Plan, RetryPolicy, Step, StepContext

MODEL_STEP = "model"
# Their result depends on nothing but what is in the key: an evaluation depends on who is champion, a promotion acts on
# the world, and a user's function may do anything.
_REUSABLE = (DataStage, VerlStage)
_NOT_IN_KEY = {
    "name",
    "after",
    "retry",
    "timeout",
    "matrix",
    "exclude",
    "failures",
    "member",
    "guards",
    "deadlines",
    "trackers",
    "placement",
    "warm_start",
    "keep",
}
_UNLIMITED = 1_000_000


def compile_run(definition: Mapping[str, Any], store_uri: str, run_id: str) -> Plan:
    """The plan of a stored run: what the driver is given to execute, on the cluster it is connected to."""
    from verl_workflow.training import cluster_device, warm_nodes

    made = Definition.from_json(definition)
    if any(isinstance(stage, VerlStage) and stage.warm_start for stage in made.pipeline.stages):
        warm_nodes()
    return compile_plan(made, gpus=cluster_device() == "cuda")


def compile_plan(definition: Definition, *, gpus: bool = False) -> Plan:
    """The plan behind a definition. Needs neither Ray nor the storage.

    Args:
        gpus: whether the cluster has accelerators; an evaluation then takes one.
    """
    steps = []
    wants_model = any(name == MODEL_STEP for stage in definition.pipeline.stages for name in _mentions(stage))
    if wants_model:
        steps.append(
            Step(
                name=MODEL_STEP,
                call=_ModelCall(definition=definition),
                retry=RetryPolicy(attempts=2, backoff_s=1.0),
            )
        )
    for stage in definition.pipeline.stages:
        previous = previous_member(definition, stage, gpus=gpus)
        steps.append(
            Step(
                name=stage.name,
                call=_StageCall(definition=definition, stage=stage),
                after=tuple(sorted({*inputs_of(definition, stage), *previous})),
                retry=_retries(stage),
                timeout_s=stage.timeout,
                num_cpus=stage.cpus if isinstance(stage, PythonStage) else 0.0,
                num_gpus=_gpus(stage, gpus),
                key=_StageKey(definition=definition, stage=stage) if reusable(definition, stage) else None,
                verify=verify_artifacts,
            )
        )
    return Plan(steps=tuple(steps))


def inputs_of(definition: Definition, stage: Stage) -> frozenset[str]:
    """The steps whose values the stage gets, or that have to have succeeded before."""
    pipeline = definition.pipeline
    named = set(_mentions(stage)) - {"params"}
    many = {name: [each.name for each in pipeline.members(name)] for name in named}
    return frozenset(step for name in named for step in many[name] or [name])


def previous_member(definition: Definition, stage: Stage, *, gpus: bool = False) -> frozenset[str]:
    """The member of the same matrix that the stage waits for, though it needs nothing of it; empty when there is none.

    What reserves nothing of its own for its step would otherwise be there as often as there are members: a training
    would wait for the cluster with its time running, and the models of all evaluations be in memory at once.
    """
    member = getattr(stage, "member", None)
    if member is None or isinstance(stage, PythonStage) or _gpus(stage, gpus):
        return frozenset()
    names = [each.name for each in definition.pipeline.members(member.of)]
    place = names.index(stage.name)
    return frozenset(names[place - 1 : place] if place else ())


def reusable(definition: Definition, stage: Stage) -> bool:
    """Whether an earlier run's result may stand in for this stage."""
    return definition.reuse and isinstance(stage, _REUSABLE)


def _retries(stage: Stage) -> RetryPolicy:
    if not isinstance(stage, VerlStage):
        return RetryPolicy(attempts=stage.retry.attempts, backoff_s=stage.retry.backoff)
    # A verl stage knows what its failures cost, and says of each whether another attempt follows.
    return RetryPolicy(attempts=_UNLIMITED, crashes=stage.retry.attempts - 1, backoff_s=stage.retry.backoff)


def _gpus(stage: Stage, there: bool) -> float:
    if isinstance(stage, PythonStage):
        return stage.gpus
    return 1.0 if there and isinstance(stage, EvaluateStage) else 0.0


def verify_artifacts(value: Any) -> None:
    """Raise unless the step had succeeded, and every artifact in its value is on disk with the recorded content."""
    if (failure := failure_of(value)) is not None:
        what = f"it had failed: {failure.get('message', '')}"
        raise VerlWorkflowError(ErrorCode.STEP_FAILED, what, remedy="The stage runs again.")
    # Without recursion: a value may be nested as deeply as JSON allows.
    left = [value]
    while left:
        found = left.pop()
        if isinstance(found, Mapping):
            if {"path", "sha256", "bytes"} <= found.keys():
                Artifact.from_json(found).verify()
            left.extend(found.values())
        elif isinstance(found, list):
            left.extend(found)


@dataclass(frozen=True, kw_only=True)
class _ModelCall:
    definition: Definition

    def __call__(self, context: StepContext) -> dict[str, Any]:
        from verl_workflow.models import make_model

        assert self.definition.pipeline.model is not None, "references to the model were checked on loading"
        model = make_model(self.definition.pipeline.model, self.definition.artifacts, self.definition.base_dir)
        return model.to_json()


@dataclass(frozen=True, kw_only=True)
class _StageCall:
    definition: Definition
    stage: Any

    def __call__(self, context: StepContext) -> Any:
        if not isinstance(self.stage, MatrixStage) or self.stage.member is None:
            return self._run(context)
        needed = {name: context.inputs[name] for name in self.stage.needs() & context.inputs.keys()}
        if (passed := passed_over(needed)) is not None:
            context.report({"phase": "passed over", "tolerated": failure_of(passed)})
            return passed
        if self.stage.failures == "tolerate":
            return tolerant(self.stage, context.attempt, lambda: self._run(context), context.report)
        return self._run(context)

    def _run(self, context: StepContext) -> Any:
        model = context.inputs.get(MODEL_STEP)
        stage_context = StageContext(
            run_id=context.run_id,
            stage=context.step,
            attempt=context.attempt,
            epoch=context.epoch,
            storage=self.definition.storage,
            records=context.run.folder,
            root=self.definition.artifacts,
            code_dir=self.definition.code_dir,
            inputs=context.inputs,
            model=Artifact.from_json(model) if model is not None else None,
            report=context.report,
        )
        stage_context.attempt_dir.mkdir(parents=True, exist_ok=True)
        if isinstance(self.stage, ChooseStage):
            return choose(self.stage, self.definition.pipeline, context.inputs)
        return _run_stage(self.stage, stage_context)


def _run_stage(stage: Any, context: StageContext) -> Any:
    if isinstance(stage, DataStage):
        from verl_workflow.data import run_data_stage

        return run_data_stage(stage, context)
    if isinstance(stage, VerlStage):
        from verl_workflow.training import run_verl_stage

        return run_verl_stage(stage, context)
    if isinstance(stage, EvaluateStage):
        from verl_workflow.evaluation import run_evaluate_stage

        return run_evaluate_stage(stage, context)
    if isinstance(stage, PromoteStage):
        from verl_workflow.registry import run_promote_stage

        return run_promote_stage(stage, context)
    assert isinstance(stage, PythonStage)
    return _run_python_stage(stage, context)


def _run_python_stage(stage: PythonStage, context: StageContext) -> Any:
    from verl_workflow.code import load_function

    function = load_function(stage.function, context.code_dir)
    arguments = {name: _resolved(value, context) for name, value in stage.args.items()}
    signature = inspect.signature(function)
    if "context" in signature.parameters:
        arguments["context"] = context
    try:
        signature.bind(**arguments)
    except TypeError as error:
        raise UserError(
            ErrorCode.SPEC_INVALID,
            f"{stage.function} cannot be called with these args: {error}",
            where=f"{stage.name}.args",
            value=sorted(arguments),
            remedy=f"Its signature is {function.__name__}{signature}.",
        ) from error
    with _in_its_folder(context.attempt_dir):
        value = function(**arguments)
    try:
        json.dumps(value, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise UserError(
            ErrorCode.SPEC_INVALID,
            f"{stage.function} returned what JSON cannot hold: {error}",
            where=stage.name,
            value=value,
            remedy="Write large or binary results below context.attempt_dir and return their path.",
        ) from error
    return value


@contextmanager
def _in_its_folder(folder: Path) -> Iterator[None]:
    """What is printed goes to the attempt's log, and relative paths lead to its folder.

    A Ray worker's own working directory is a copy of the code that other runs use as well.
    """
    if threading.current_thread() is not threading.main_thread():
        # Both are the whole process's, and others use them.
        yield
        return
    before = Path.cwd()
    os.chdir(folder)
    try:
        with (
            (folder / "log.txt").open("a", buffering=1, encoding="utf-8") as log,
            redirect_stdout(log),
            redirect_stderr(log),
        ):
            yield
    finally:
        os.chdir(before)


def _resolved(value: Any, context: StageContext) -> Any:
    if isinstance(value, str):
        return context.value(value)
    if isinstance(value, Mapping):
        return {key: _resolved(item, context) for key, item in value.items()}
    if isinstance(value, list):
        return [_resolved(item, context) for item in value]
    return value


@dataclass(frozen=True, kw_only=True)
class _StageKey:
    """A stage's identity over runs: spec, content of inputs, the user's code, tool versions; never a path or a name."""

    definition: Definition
    stage: Any

    def __call__(self, inputs: Mapping[str, Any]) -> str:
        spec = _by_content(spec_in_key(self.stage), inputs)
        if isinstance(self.stage, VerlStage) and self.stage.extends:
            spec["extends"] = self._extended(self.stage)
        identity = {
            "spec": spec,
            "code": self.definition.code_digest,
            "versions": dict(self.definition.versions),
        }
        return hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()

    def _extended(self, stage: VerlStage) -> Any:
        """By content: a run of that id may have been deleted, and another have the id."""
        from verl_workflow.training import extended

        found = extended(stage, self.definition.storage)
        assert found is not None, "the stage extends something"
        return {"step": found.step, **found.content}


def spec_in_key(stage: Stage) -> dict[str, Any]:
    """Those of a stage's settings that its result depends on."""
    return stage.model_dump(mode="json", exclude=_NOT_IN_KEY)


def _by_content(value: Any, inputs: Mapping[str, Any]) -> Any:
    if isinstance(value, Mapping):
        if {"path", "sha256"} <= value.keys():
            return {"sha256": value["sha256"]}
        return {key: _by_content(item, inputs) for key, item in value.items()}
    if isinstance(value, list):
        return [_by_content(item, inputs) for item in value]
    if not isinstance(value, str):
        return value
    match = REFERENCE.fullmatch(value)
    if match is not None and match.group(1) in inputs:
        found: Any = inputs[match.group(1)]
        for part in (match.group(2) or "").split(".") if match.group(2) else []:
            found = found[part]
        return _by_content(found, {}) if not isinstance(found, str) else found
    if Path(value).is_absolute():
        root = Path(value).anchor
        return [Artifact.of(path).sha256 for path in sorted(Path(root).glob(value.removeprefix(root)))] or value
    return value


def _mentions(stage: Any) -> list[str]:
    return [name for _, name, _ in stage.references()] + list(stage.after)
