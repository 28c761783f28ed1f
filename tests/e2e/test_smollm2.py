"""A real model on real data: SmolLM2-135M-Instruct learns to add, and is promoted only because its gate says so."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from _victims import Command

from verl_workflow.storage import Store
from verl_workflow.workflow import RunState, RunStatus, read_run

ROOT = Path(__file__).parents[2]
PIPELINE = ROOT / "pipelines" / "smollm2-arithmetic.yaml"
MINUTES = 60.0
pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(60 * MINUTES)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("smollm2")


def run(folder: Path, run_id: str, *params: str) -> RunState:
    storage = folder / "storage"
    options = [text for param in params for text in ("-p", param)]
    command = Command(
        ["run", str(PIPELINE), "--run-id", run_id, "--storage", str(storage), *options], folder / f"{run_id}.log"
    )
    try:
        assert command.wait(40 * MINUTES) == 0, command.tail()
    finally:
        command.stop()
    return read_run(Store(str(storage)), run_id)


def value(state: RunState, stage: str) -> Any:
    return state.steps[stage].value


@pytest.fixture(scope="module")
def strict(folder: Path) -> RunState:
    """Its gate asks for a model that makes no mistake."""
    return run(folder, "strict", "minimum_accuracy=1")


@pytest.fixture(scope="module")
def lenient(folder: Path, strict: RunState) -> RunState:
    """The same training, behind the gate that the pipeline comes with."""
    return run(folder, "lenient")


def test_four_steps_of_grpo_raise_the_accuracy_on_questions_it_has_not_seen(strict: RunState) -> None:
    assert strict.status is RunStatus.SUCCEEDED
    assert value(strict, "train")["step"] == 4
    before, after = value(strict, "baseline")["candidate"], value(strict, "evaluate")["candidate"]
    assert before["rows"] == after["rows"] == 64
    assert after["acc"] >= before["acc"] + 0.2


def test_a_model_below_its_gate_is_not_promoted(strict: RunState) -> None:
    assert value(strict, "evaluate")["candidate"]["acc"] < 1
    assert value(strict, "promote")["promoted"] is False


def test_the_same_model_is_promoted_through_a_gate_that_it_passes(strict: RunState, lenient: RunState) -> None:
    assert lenient.steps["train"].reused_from == "strict"
    promoted = value(lenient, "promote")
    assert promoted["promoted"] is True, json.dumps(promoted)
    assert value(lenient, "evaluate")["candidate"]["acc"] == value(strict, "evaluate")["candidate"]["acc"]
