"""A matrix in the plan: what each member waits for, is known by, and comes to when it fails."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from verl_workflow.artifacts import Artifact
from verl_workflow.errors import ErrorCode, FencedError, UserError, VerlWorkflowError
from verl_workflow.pipeline import _compile, define, plan
from verl_workflow.pipeline._compile import compile_plan, verify_artifacts
from verl_workflow.pipeline._tolerance import failure_of, tolerant
from verl_workflow.spec import PythonStage, VerlStage, load
from verl_workflow.storage import Store
from verl_workflow.workflow import Driver, InlineLauncher, RunState, create_run, read_run

SWEEP = Path(__file__).parents[2] / "pipelines/sweep.yaml"

PIPELINE = """
version: 1
name: sums
stages:
  add:
    kind: python
    matrix:
      number: [1, 2, 3]
    failures: tolerate
    retry: {attempts: 1}
    function: steps.py:add
    args: {number: "${matrix.number}"}
  double:
    kind: python
    matrix: add
    function: steps.py:double
    args: {sum: "${add.sum}"}
  best:
    kind: choose
    of: double
    by: sum
  last:
    kind: python
    function: steps.py:double
    args: {sum: "${best.sum}"}
    after: [add]
"""
STEPS = """
def add(number):
    if number in BROKEN:
        raise ValueError(f"{number} is not to be added")
    return {"sum": number + 1}


def double(sum):
    return {"sum": 2 * sum}
"""


@pytest.fixture
def sums(tmp_path: Path) -> Path:
    folder = tmp_path / "sums"
    folder.mkdir()
    (folder / "pipeline.yaml").write_text(PIPELINE)
    return folder


def run(folder: Path, storage: Path, broken: str, run_id: str = "r") -> RunState:
    """The pipeline in this process."""
    (folder / "steps.py").write_text(f"BROKEN = {{{broken}}}\n{STEPS}")
    definition = define(load(folder / "pipeline.yaml"), run_id=run_id, storage=str(storage))
    store = Store(str(storage))
    create_run(store, run_id, definition.to_json())
    definition.code_dir.mkdir(parents=True)
    (definition.code_dir / "steps.py").write_text((folder / "steps.py").read_text())
    Driver(store=store, run_id=run_id, plan=compile_plan(definition), launcher=InlineLauncher()).run()
    return read_run(store, run_id)


def values(state: RunState) -> dict[str, Any]:
    return {name: step.value for name, step in state.steps.items()}


def test_the_winner_of_a_sweep_is_handed_on(sums: Path, tmp_path: Path) -> None:
    state = run(sums, tmp_path / "s", "0")
    assert state.status.value == "succeeded", state.error
    found = values(state)
    assert [found[f"double-{number}"]["sum"] for number in (1, 2, 3)] == [4, 6, 8]
    assert (found["best"]["winner"], found["best"]["values"], found["best"]["sum"]) == ("double-3", {"number": 3}, 8)
    assert found["last"] == {"sum": 16}


def test_a_member_that_fails_is_passed_over_where_that_is_tolerated(sums: Path, tmp_path: Path) -> None:
    state = run(sums, tmp_path / "s", "3")
    assert state.status.value == "succeeded", state.error
    found = values(state)
    failure = failure_of(found["add-3"])
    assert failure is not None
    assert failure["message"] == "ValueError: 3 is not to be added"
    assert found["double-3"] == found["add-3"]
    assert found["best"]["winner"] == "double-2"
    assert found["best"]["table"][2]["error"] == "ValueError: 3 is not to be added"
    assert found["last"] == {"sum": 12}
    for name in ("add-3", "double-3"):
        progress = state.steps[name].progress
        assert progress is not None
        assert progress["tolerated"]["message"] == failure["message"]


def test_when_every_member_fails_the_run_does(sums: Path, tmp_path: Path) -> None:
    state = run(sums, tmp_path / "s", "1, 2, 3")
    assert state.status.value == "failed"
    assert "all 3 members have failed" in str(state.error)


def test_a_member_that_fails_fails_the_run_where_that_is_not_tolerated(sums: Path, tmp_path: Path) -> None:
    (sums / "pipeline.yaml").write_text(PIPELINE.replace("    failures: tolerate\n", ""))
    state = run(sums, tmp_path / "s", "3")
    assert state.status.value == "failed"
    assert "3 is not to be added" in str(state.error)


def boom(error: Exception) -> Any:
    def raises() -> Any:
        raise error

    return raises


PYTHON = PythonStage(name="m-1", function="f.py:f", failures="tolerate")
VERL = VerlStage(
    name="m-1", train="t", validation="v", reward={"function": "r.py:f"}, steps=1, batch_size=1, save_every=1
)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("stage", "attempt", "error", "caught"),
    [
        (PYTHON, 1, ValueError("x"), False),
        (PYTHON, 2, ValueError("x"), False),
        (PYTHON, 3, ValueError("x"), True),
        (PYTHON, 1, UserError(ErrorCode.DATA_INVALID, "x"), True),
        (PYTHON, 1, VerlWorkflowError(ErrorCode.STORAGE, "x", retryable=True), False),
        (VERL, 9, VerlWorkflowError(ErrorCode.TRAINING_FAILED, "x", retryable=True), False),
        (VERL, 1, VerlWorkflowError(ErrorCode.TRAINING_FAILED, "x"), True),
        (PYTHON, 3, FencedError(ErrorCode.FENCED, "x"), False),
    ],
)
def test_a_failure_is_tolerated_only_when_no_attempt_follows(
    stage: Any, attempt: int, error: Exception, caught: bool
) -> None:
    if caught:
        assert failure_of(tolerant(stage, attempt, boom(error), lambda _: None)) is not None
    else:
        with pytest.raises(type(error)):
            tolerant(stage, attempt, boom(error), lambda _: None)


def test_a_tolerated_failure_is_never_taken_for_an_earlier_result() -> None:
    failed = tolerant(PYTHON, 3, boom(ValueError("x")), lambda _: None)
    with pytest.raises(VerlWorkflowError, match="it had failed"):
        verify_artifacts(failed)


def test_members_are_steps_each_with_a_key_that_others_have_no_part_in(tmp_path: Path) -> None:
    definition = define(load(SWEEP), storage=str(tmp_path))
    steps = {step.name: step for step in compile_plan(definition).steps}
    assert set(steps["best"].after) == {"evaluate-1", "evaluate-2"}
    inputs = {
        name: {output: {"path": "/x", "sha256": output, "bytes": 1} for output in ("train", "validation")}
        for name in ("prepare",)
    } | {"model": {"path": "/m", "sha256": "m", "bytes": 1}}

    def key(name: str, among: Mapping[str, Any]) -> str:
        made = among[name].key
        assert made is not None
        return str(made(inputs))

    assert key("train-1", steps) != key("train-2", steps)
    alone = tmp_path / "sweep.yaml"
    alone.write_text(SWEEP.read_text().replace("[0.001, ", "["))
    (tmp_path / "quickstart").mkdir()
    (tmp_path / "quickstart/task.py").write_text((SWEEP.parent / "quickstart/task.py").read_text())
    other = {step.name: step for step in compile_plan(define(load(alone), storage=str(tmp_path))).steps}
    assert key("train-1", other) == key("train-2", steps)
    # A stage without any matrix and with the same values is the same, too.
    plain = definition.pipeline.stage("train-2").model_copy(update={"member": None, "name": "x"})
    assert _compile.spec_in_key(plain) == _compile.spec_in_key(definition.pipeline.stage("train-2"))


def test_what_reserves_nothing_of_its_own_runs_one_after_the_other(tmp_path: Path) -> None:
    definition = define(load(SWEEP), storage=str(tmp_path))

    def after(gpus: bool) -> dict[str, set[str]]:
        return {step.name: set(step.after) for step in compile_plan(definition, gpus=gpus).steps}

    assert after(False)["train-2"] == {"model", "prepare", "train-1"}
    assert after(False)["evaluate-2"] == {"prepare", "train-2", "evaluate-1"}
    assert after(True)["evaluate-2"] == {"prepare", "train-2"}


def artifact(folder: Path, name: str) -> Mapping[str, Any]:
    (folder / name).write_text(name)
    return Artifact.of(folder / name).to_json()


def test_the_plan_names_the_members_and_takes_each_for_itself(tmp_path: Path) -> None:
    rows = {row.stage: row for row in plan(load(SWEEP), storage=str(tmp_path / "s")).rows}
    assert rows["train-1"].values == {"learning_rate": 0.001}
    assert rows["evaluate-2"].values == {"learning_rate": 0.005}
    assert rows["best"].kind == "choose"
    # One member waits for the other, and needs nothing of it.
    assert "train-1" not in rows["train-2"].why

    definition = define(load(SWEEP), run_id="r", storage=str(tmp_path / "s"))
    store = Store(definition.storage)
    create_run(store, "r", definition.to_json())
    (tmp_path / "files").mkdir()
    results: dict[str, Any] = {
        "questions": {"questions": artifact(tmp_path / "files", "questions")},
        "prepare": {name: artifact(tmp_path / "files", name) for name in ("train", "validation")},
        "model": artifact(tmp_path / "files", "model"),
    }
    compiled = compile_plan(definition)
    steps = tuple(replace(step, call=lambda context: results.get(context.step, {})) for step in compiled.steps)
    Driver(store=store, run_id="r", plan=replace(compiled, steps=steps), launcher=InlineLauncher()).run()
    rows = {row.stage: row for row in plan(load(SWEEP), storage=str(tmp_path / "s")).rows}
    assert [rows[name].why.partition(" if ")[0] for name in ("train-1", "train-2")] == ["re-used from r"] * 2


CHAIN = """
version: 1
name: chain
model: {builtin: tiny}
stages:
  easy: &easy
    kind: data
    source: {jsonl: rows.jsonl}
    prompt: "{{ question }}"
    answer: answer
    validation: 2
  hard: {<<: *easy, prompt: "Think: {{ question }}"}
  warm_up: &train
    kind: verl
    train: ${easy.train}
    validation: ${easy.validation}
    reward: {function: "reward.py:format"}
    steps: 4
    batch_size: 4
    save_every: 2
  train:
    <<: *train
    model: ${warm_up.model}
    train: ${hard.train}
    validation: ${hard.validation}
    reward: {function: "reward.py:right"}
"""


def test_a_stage_can_start_from_anothers_model_with_data_and_a_reward_of_its_own(tmp_path: Path) -> None:
    arguments = "data_source, solution_str, ground_truth, extra_info=None"
    (tmp_path / "reward.py").write_text(
        "".join(f"def {name}({arguments}):\n    return 0.0\n\n\n" for name in ("format", "right"))
    )
    (tmp_path / "rows.jsonl").write_text("".join(f'{{"question": "{n}", "answer": "x"}}\n' for n in range(10)))
    (tmp_path / "chain.yaml").write_text(CHAIN)
    document = load(tmp_path / "chain.yaml")
    definition = define(document, storage=str(tmp_path / "s"))
    steps = {step.name: step for step in compile_plan(definition).steps}
    assert set(steps["warm_up"].after) == {"model", "easy"}
    # The model is what they exchange: nothing of the first stage's checkpoints is in the second one's inputs.
    assert set(steps["train"].after) == {"warm_up", "hard"}
    rows = {row.stage: row for row in plan(document, storage=str(tmp_path / "s")).rows}
    assert list(rows).index("warm_up") < list(rows).index("train")

    def key(model: str, checkpoint: str) -> str:
        file = {"path": "/a", "sha256": "d", "bytes": 1}
        inputs = {
            "hard": {"train": file, "validation": file},
            "warm_up": {"model": {**file, "sha256": model}, "checkpoint": {"path": checkpoint, "step": 4}},
        }
        made = steps["train"].key
        assert made is not None
        return str(made(inputs))

    assert key("m", "/a") == key("m", "/b")
    assert key("m", "/a") != key("n", "/a")
