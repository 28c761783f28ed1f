"""Records that are not as they were written: one damaged run hides no other, and says what is wrong with it."""

from __future__ import annotations

import json
from typing import Any

import pytest
from _runs import Invoke, Runs

from verl_workflow.cli._facts import facts_of
from verl_workflow.cli._output import print_table
from verl_workflow.cli._view import progress, table
from verl_workflow.workflow import RunState, RunStatus, StepState, StepStatus

STAGE = {"name": "a", "kind": "python"}
PIPELINE = {"name": "demo", "stages": [STAGE]}


@pytest.mark.parametrize(
    "change",
    [
        {"definition": {}},
        {"definition": {"pipeline": "x"}},
        {"definition": {"pipeline": {**PIPELINE, "stages": [{}]}}},
        {"definition": {"pipeline": {**PIPELINE, "stages": {}}}},
        {"definition": {"pipeline": {"stages": [STAGE]}}},
        {"created_at": "yesterday"},
    ],
)
def test_a_run_whose_definition_is_no_pipelines_is_damaged_and_the_others_go_on(
    runs: Runs, invoke: Invoke, change: dict[str, Any]
) -> None:
    runs.finish("bad", {"a": lambda _: 1})
    runs.finish("good", {"a": lambda _: 1})
    key = "runs/bad/definition.json"
    runs.store.put(key, json.dumps({**json.loads(runs.store.get(key) or b""), **change}).encode())

    listed = invoke("list", "--json")
    assert listed.exit_code == 0
    found = {run["run_id"]: run for run in json.loads(listed.stdout)["runs"]}
    assert {name: run["status"] for name, run in found.items()} == {"bad": "damaged", "good": "succeeded"}
    assert key in found["bad"]["error"]["message"]
    shown = invoke("list")
    assert shown.exit_code == 0
    assert f"error: bad: {key}" in shown.stderr
    for command in (["status", "bad"], ["logs", "bad"], ["plot", "bad"]):
        shown = invoke(*command, "--json")
        assert shown.exit_code == 1, command
        assert json.loads(shown.stdout)["error"]["code"] == "journal_damaged"


def nested(depth: int) -> Any:
    value: Any = 1
    for _ in range(depth):
        value = [value]
    return value


def test_a_value_that_is_nested_deeply_is_shown(runs: Runs, invoke: Invoke) -> None:
    runs.finish("r1", {"a": lambda _: nested(700)})
    shown = invoke("status", "r1")
    assert shown.exit_code == 0, shown.output
    assert "[[[[" in shown.stdout
    shown = invoke("status", "r1", "--json")
    assert shown.exit_code == 0, shown.output
    assert json.loads(shown.stdout)["stages"][0]["value"] == nested(700)


def test_half_a_surrogate_pair_is_escaped(runs: Runs, invoke: Invoke) -> None:
    runs.finish("r1", {"a": lambda _: {"text": "ü\ud800"}})
    shown = invoke("status", "r1")
    assert shown.exit_code == 0, shown.output
    assert "ü\\ud800" in shown.stdout
    shown = invoke("status", "r1", "--json")
    assert shown.exit_code == 0, shown.output
    assert json.loads(shown.stdout)["stages"][0]["value"] == {"text": "ü\ud800"}


def test_what_a_stage_says_is_no_markup(runs: Runs, invoke: Invoke) -> None:
    runs.finish("r1", {"a": lambda _: 1})
    key = "runs/r1/definition.json"
    stored = json.loads(runs.store.get(key) or b"")
    stored["definition"]["pipeline"]["name"] = "[/red]:smile:"
    runs.store.put(key, json.dumps(stored).encode())
    shown = invoke("list")
    assert shown.exit_code == 0
    assert "[/red]:smile:" in shown.stdout


def test_a_log_that_is_no_file_is_passed_over(runs: Runs, invoke: Invoke) -> None:
    runs.finish("r1", {"a": lambda _: 1})
    runs.log("r1", "a", 1).mkdir()
    shown = invoke("logs", "r1")
    assert shown.exit_code == 0, shown.output
    assert shown.stdout.splitlines()[-1] == "a#1 | -- succeeded"


@pytest.mark.parametrize("wrong", ["x", "soon", True, [], {}, float("nan"), float("inf"), 10**400])
def test_reported_figures_that_are_no_numbers_are_ignored(wrong: Any) -> None:
    step = StepState(
        name="a",
        status=StepStatus.RUNNING,
        progress=dict.fromkeys(["step", "total", "reward", "step_seconds", "eta_seconds", "phase"], wrong),
    )
    state = RunState(run_id="r1", status=RunStatus.RUNNING, steps={"a": step}, definition={"pipeline": PIPELINE})
    facts = facts_of(state, "file:///s")
    stage = facts.stages[0]
    assert (stage.done, stage.total, stage.reward, stage.step_seconds, stage.eta) == (None,) * 5
    assert progress(stage) == (wrong if isinstance(wrong, str) else "")
    print_table(table(facts))


@pytest.mark.parametrize(("done", "total"), [(3, 0), (3, -10), (-3, 10), (1e308, 1e-308), (0.5, 3)])
def test_a_bar_is_drawn_for_any_numbers(done: float, total: float) -> None:
    step = StepState(name="a", status=StepStatus.RUNNING, progress={"step": done, "total": total, "step_seconds": -1})
    state = RunState(run_id="r1", status=RunStatus.RUNNING, steps={"a": step}, definition={"pipeline": PIPELINE})
    print_table(table(facts_of(state, "file:///s")))
