from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from verl_workflow.artifacts import Artifact
from verl_workflow.errors import ErrorCode, FencedError, UserError, VerlWorkflowError
from verl_workflow.pipeline import StageContext
from verl_workflow.registry import Lineage, Registry, run_promote_stage
from verl_workflow.spec import PromoteStage
from verl_workflow.storage import Store

MakeModel = Callable[[str], Artifact]
Contexts = Callable[..., StageContext]


@pytest.fixture
def real_check() -> None:
    """Asked for by tests that are about loading the copied model; the others save the time."""


@pytest.fixture(autouse=True)
def check(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if "real_check" not in request.fixturenames:
        defaults = Registry.__init__.__kwdefaults__
        assert defaults is not None
        monkeypatch.setitem(defaults, "check", lambda source, copy: None)


def evaluation(candidate: Artifact, score: float = 0.9, champion: dict[str, Any] | None = None) -> dict[str, Any]:
    return {
        "model": candidate.to_json(),
        "candidate": {"score": score, "acc": score, "rows": 64, "artifact": candidate.to_json()},
        "champion": champion,
        "difference": None if champion is None else {"mean": 0.1, "low": 0.05, "high": 0.15},
        "rows": 64,
        "data": {"path": "/rows", "sha256": "e" * 64, "bytes": 1},
    }


def met(version: str, score: float = 0.8, registry: str = "math") -> dict[str, Any]:
    return {"score": score, "acc": score, "rows": 64, "version": version, "registry": registry}


@pytest.fixture
def contexts(store: Store, tmp_path: Path) -> Contexts:
    def make(found: Any, run: str = "monday", **changes: Any) -> StageContext:
        fields = {
            "run_id": run,
            "stage": "promote",
            "attempt": 1,
            "epoch": 1,
            "storage": store.uri,
            "records": f"runs/{run}/0123456789abcdef",
            "root": tmp_path / "files",
            "code_dir": tmp_path,
            "inputs": {"evaluate": found},
        }
        return StageContext(**{**fields, **changes})

    return make


@pytest.fixture
def registry(store: Store, tmp_path: Path) -> Registry:
    return Registry(store, tmp_path / "files")


def spec(**fields: Any) -> PromoteStage:
    return PromoteStage.model_validate(
        {"name": "promote", "registry": "math", "evaluation": "${evaluate}", "gate": "candidate.score > 0.5", **fields}
    )


def crown(registry: Registry, model: Artifact, run: str, number: int | None = None) -> str:
    version = registry.register("math", model, Lineage(run=run, stage="promote")).version
    registry.set_alias("math", "champion", version, number, run=run, stage="promote")
    return version


def test_a_model_whose_gate_holds_is_registered_and_becomes_champion(
    real_check: None, registry: Registry, model: MakeModel, contexts: Contexts
) -> None:
    candidate = model("a")
    outputs = run_promote_stage(spec(), contexts(evaluation(candidate)))
    found = registry.resolve("math", "champion")
    assert outputs == {
        "promoted": True,
        "reason": "the gate holds: candidate.score > 0.5 (candidate: score 0.9, acc 0.9; champion: none; rows 64)",
        "version": "v0001",
        "model": found.artifact.to_json(),
    }
    json.dumps(outputs)
    registry.verify("math", "v0001")
    move = registry.history("math", "champion")[0]
    assert (move.run, move.stage, move.epoch) == ("monday", "promote", 1)
    assert found.evaluation["candidate"]["score"] == 0.9
    assert found.evaluation["gate"] == "candidate.score > 0.5"
    assert found.lineage.data == {"evaluation": "e" * 64}


def test_a_better_candidate_replaces_the_champion_it_was_compared_with(
    registry: Registry, model: MakeModel, contexts: Contexts
) -> None:
    first = crown(registry, model("a"), "sunday")
    gate = "candidate.score > champion.score and difference.low > 0 and rows >= 64"
    outputs = run_promote_stage(spec(gate=gate), contexts(evaluation(model("b"), champion=met(first))))
    assert (outputs["promoted"], outputs["version"]) == (True, "v0002")
    assert "difference: mean 0.1, low 0.05, high 0.15" in outputs["reason"]
    assert registry.resolve("math", "champion").lineage.champion == first


def test_a_gate_that_does_not_hold_registers_nothing(
    registry: Registry, store: Store, tmp_path: Path, model: MakeModel, contexts: Contexts
) -> None:
    found = evaluation(model("a"), score=0.4, champion=met("v0001", 0.8))
    outputs = run_promote_stage(spec(gate="candidate.score > champion.score"), contexts(found))
    assert (outputs["promoted"], outputs["version"], outputs["model"]) == (False, None, None)
    assert outputs["reason"] == (
        "the gate does not hold: candidate.score > champion.score (candidate: score 0.4, acc 0.4; "
        "champion v0001: score 0.8, acc 0.8; difference: mean 0.1, low 0.05, high 0.15; rows 64)"
    )
    assert (store.list("registry"), (tmp_path / "files").exists()) == ([], False)


def test_a_champion_that_was_not_met_is_not_replaced(
    registry: Registry, store: Store, model: MakeModel, contexts: Contexts
) -> None:
    first = crown(registry, model("a"), "sunday")
    second = crown(registry, model("b"), "saturday", 1)
    before = store.list("registry")
    candidate = model("c")
    for champion in (None, met(first), met(second, registry="other")):
        with pytest.raises(VerlWorkflowError, match="champion is v0002, but the candidate was") as caught:
            run_promote_stage(spec(), contexts(evaluation(candidate, champion=champion)))
        assert caught.value.code is ErrorCode.REGISTRY_CONFLICT
        assert "Start a new run, with `champion: math`" in caught.value.remedy
    assert store.list("registry") == before


def test_another_alias_needs_no_opponent(registry: Registry, model: MakeModel, contexts: Contexts) -> None:
    crown(registry, model("a"), "sunday")
    for run, name in (("monday", "b"), ("tuesday", "c")):
        outputs = run_promote_stage(spec(alias="staging"), contexts(evaluation(model(name)), run))
        assert outputs["promoted"]
    assert registry.resolve("math", "staging").version == "v0003"
    assert registry.resolve("math", "champion").version == "v0001"


def test_a_move_between_look_and_record_is_a_conflict(
    registry: Registry, model: MakeModel, contexts: Contexts, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, rival = crown(registry, model("a"), "sunday"), model("rival")
    register = Registry.register

    def slow(self: Registry, *arguments: Any) -> Any:
        monkeypatch.setattr(Registry, "register", register)
        crown(registry, rival, "rival", 1)
        return register(self, *arguments)

    monkeypatch.setattr(Registry, "register", slow)
    with pytest.raises(VerlWorkflowError) as caught:
        run_promote_stage(spec(), contexts(evaluation(model("b"), champion=met(first))))
    assert caught.value.code is ErrorCode.REGISTRY_CONFLICT
    assert registry.resolve("math", "champion").lineage.run == "rival"


class Died(Exception):
    pass


@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize("at", [1, 2, 3])
def test_death_at_any_write_and_a_retry_promote_once(
    registry: Registry,
    model: MakeModel,
    contexts: Contexts,
    monkeypatch: pytest.MonkeyPatch,
    at: int,
    after: bool,
) -> None:
    first = crown(registry, model("a"), "sunday")
    found = evaluation(model("b"), champion=met(first))
    create, writes = Store.create, []

    def dying(self: Store, key: str, data: bytes) -> bool:
        writes.append(key)
        if len(writes) == at and not after:
            raise Died(key)
        wrote = create(self, key, data)
        if len(writes) == at:
            raise Died(key)
        return wrote

    monkeypatch.setattr(Store, "create", dying)
    with pytest.raises(Died):
        run_promote_stage(spec(), contexts(found))
    outputs = run_promote_stage(spec(), contexts(found, attempt=2, epoch=2))
    assert (outputs["promoted"], outputs["version"]) == (True, "v0002")
    assert [version.version for version in registry.versions("math")] == ["v0001", "v0002"]
    assert [move.version for move in registry.history("math", "champion")] == ["v0001", "v0002"]
    registry.verify("math", "v0002")


def test_a_retry_does_not_undo_what_came_after_its_own_move(
    registry: Registry, model: MakeModel, contexts: Contexts
) -> None:
    found = evaluation(model("a"))
    first = run_promote_stage(spec(), contexts(found))
    crown(registry, model("b"), "tuesday", 1)
    assert run_promote_stage(spec(), contexts(found, attempt=2)) == first
    assert registry.resolve("math", "champion").lineage.run == "tuesday"


def test_the_champion_itself_is_not_registered_again(registry: Registry, model: MakeModel, contexts: Contexts) -> None:
    same = model("a")
    crown(registry, same, "sunday")
    outputs = run_promote_stage(spec(), contexts(evaluation(same, champion=met("v0001"))))
    assert (outputs["promoted"], outputs["version"]) == (False, "v0001")
    assert "same bytes already, v0001" in outputs["reason"]
    assert len(registry.versions("math")) == len(registry.history("math", "champion")) == 1


def test_a_model_that_is_gone_or_broken_is_refused(registry: Registry, model: MakeModel, contexts: Contexts) -> None:
    candidate = model("a")
    shutil.rmtree(candidate.path)
    with pytest.raises(UserError) as caught:
        run_promote_stage(spec(), contexts(evaluation(candidate)))
    assert caught.value.code is ErrorCode.MODEL_INVALID
    assert registry.alias("math", "champion") is None


def test_an_evaluation_that_is_none_is_told(model: MakeModel, contexts: Contexts) -> None:
    with pytest.raises(UserError, match="the evaluation has no champion, rows"):
        run_promote_stage(spec(), contexts({"model": {}, "candidate": {}}))
    with pytest.raises(UserError, match=r"there is no candidate\.accuracy"):
        run_promote_stage(spec(gate="candidate.accuracy > 1"), contexts(evaluation(model("a"))))


def driven_run(store: Store, candidate: Artifact) -> None:
    """A run as its driver records it: data, a trained model, and what they came from."""
    from verl_workflow.workflow import Driver, InlineLauncher, Plan, Step, create_run

    values = {
        "model": {"path": "/start", "sha256": "1" * 64, "bytes": 1},
        "prepare": {
            "train": {"path": "/t", "sha256": "2" * 64, "bytes": 1},
            "validation": {"path": "/v", "sha256": "3" * 64, "bytes": 1},
        },
        "train": {"model": candidate.to_json(), "extended": {"run": "sunday", "stage": "train", "step": 6}},
    }
    stages = [
        {"kind": "data", "name": "prepare"},
        {
            "kind": "verl",
            "name": "train",
            "model": "${model}",
            "train": "${prepare.train}",
            "validation": "${prepare.validation}",
        },
    ]
    definition = {
        "pipeline": {"name": "nightly", "stages": stages},
        "code_digest": "c" * 64,
        "versions": {"verl": "0.9.1"},
    }
    create_run(store, "monday", definition)
    plan = Plan(steps=tuple(Step(name=name, call=lambda _, value=value: value) for name, value in values.items()))
    Driver(store, "monday", plan, InlineLauncher()).run()


def test_lineage_tells_data_code_config_and_parent(
    registry: Registry, store: Store, model: MakeModel, contexts: Contexts
) -> None:
    candidate = model("a")
    driven_run(store, candidate)
    run_promote_stage(spec(), contexts(evaluation(candidate), attempt=3))
    lineage = registry.resolve("math", "champion").lineage
    assert (lineage.run, lineage.stage, lineage.epoch, lineage.attempt) == ("monday", "promote", 1, 3)
    assert lineage.data == {"train": "2" * 64, "validation": "3" * 64, "evaluation": "e" * 64}
    assert (lineage.pipeline, lineage.parent, lineage.code) == ("nightly", "1" * 64, "c" * 64)
    assert lineage.config is not None and len(lineage.config) == 64
    assert lineage.versions == {"verl": "0.9.1"}
    assert lineage.extends == "sunday/train"


def test_a_driver_that_was_taken_over_moves_nothing(
    registry: Registry, store: Store, model: MakeModel, contexts: Contexts
) -> None:
    candidate = model("a")
    driven_run(store, candidate)
    with pytest.raises(FencedError):
        run_promote_stage(spec(), contexts(evaluation(candidate), epoch=0))
    assert registry.alias("math", "champion") is None
