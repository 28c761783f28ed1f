"""How the members of a matrix are told of: by `validate`, `plan`, `status` and the summary."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

from typer.testing import CliRunner

from verl_workflow.cli._app import app
from verl_workflow.cli._facts import facts_of
from verl_workflow.cli._summary import summary
from verl_workflow.cli._view import table, transition
from verl_workflow.pipeline._tolerance import stand_in
from verl_workflow.storage import Store
from verl_workflow.workflow import Driver, InlineLauncher, Plan, RunState, Step, StepContext, create_run, read_run

SWEEP = str(Path(__file__).parents[2] / "pipelines/sweep.yaml")
FAILURE = {"code": "training_failed", "message": "train-2: the training failed (numeric)\nits log"}


def told(*arguments: str) -> str:
    result = CliRunner().invoke(app, [*arguments])
    assert result.exit_code == 0, result.output
    return result.output


def test_validate_lists_the_members_with_their_values() -> None:
    lines = told("validate", SWEEP).splitlines()
    assert "  train-2 (verl) learning_rate=0.005 after prepare" in lines
    assert "  best (choose) after evaluate" in lines
    stages = json.loads(told("validate", SWEEP, "--json"))["stages"]
    assert {stage["name"]: stage["values"] for stage in stages}["evaluate-1"] == {"learning_rate": 0.001}


def test_plan_lists_the_members_with_their_values(tmp_path: Path) -> None:
    rows = json.loads(told("plan", SWEEP, "--storage", str(tmp_path), "--json"))["rows"]
    assert {row["stage"]: row["values"] for row in rows}["train-2"] == {"learning_rate": 0.005}
    assert "train-2 learning_rate=0.005" in told("plan", SWEEP, "--storage", str(tmp_path))


def sweep(tmp_path: Path) -> RunState:
    """A run of two members, of which the second failed and was tolerated."""
    results: dict[str, Any] = {
        "train-1": {"step": 4, "reward": {"first": 0.1, "last": 0.4, "best": 0.4}},
        "train-2": stand_in("train-2", FAILURE),
        "best": {
            "winner": "train-1",
            "values": {"lr": 0.001},
            "figure": 0.4,
            "table": [{"member": "train-1", "error": None}, {"member": "train-2", "error": "it failed"}],
        },
    }

    def call(context: StepContext) -> Any:
        if context.step == "train-2":
            context.report({"phase": "failed", "tolerated": FAILURE})
        return results[context.step]

    kinds = {"train-1": "verl", "train-2": "verl", "best": "choose"}
    values = {"train-1": 0.001, "train-2": 0.1}
    stages = [
        {
            "name": name,
            "kind": kind,
            "member": {"of": "train", "values": {"lr": values[name]}} if values.get(name) else 0,
        }
        for name, kind in kinds.items()
    ]
    store = Store(str(tmp_path))
    create_run(store, "r", {"pipeline": {"name": "p", "stages": stages}})
    steps = tuple(Step(name=name, call=call) for name in results)
    Driver(store=store, run_id="r", plan=Plan(steps=steps), launcher=InlineLauncher()).run()
    return read_run(store, "r")


def test_a_member_that_failed_and_was_tolerated_is_not_called_a_success(tmp_path: Path) -> None:
    facts = facts_of(sweep(tmp_path), f"file://{tmp_path}", values=True)
    assert {stage.name: (stage.status, stage.values) for stage in facts.stages} == {
        "train-1": ("succeeded", {"lr": 0.001}),
        "train-2": ("tolerated", {"lr": 0.1}),
        "best": ("succeeded", {}),
    }
    assert "train-2: tolerated" in transition(facts.stages[1])
    lines = [line.split("  ")[-1].strip() for line in summary(facts)]
    assert lines[2] == "failed, and the run went on without it: train-2: the training failed (numeric)"
    assert "  train-2 lr=0.1" in summary(facts)[2]
    assert lines[3].startswith("train-1 (lr 0.001) is best of 2, 1 of which failed: 0.400 (")
    json.dumps(facts.to_json())


def test_the_table_shows_what_each_member_is(tmp_path: Path) -> None:
    from rich.console import Console

    console = Console(width=160, record=True, file=io.StringIO())
    console.print(table(facts_of(sweep(tmp_path), f"file://{tmp_path}")))
    text = console.export_text()
    assert "train-1 lr=0.001" in text
    assert "tolerated" in text
