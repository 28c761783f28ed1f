"""Workflows that are taken up when the code of their finished steps is no longer what it was."""

from __future__ import annotations

import importlib
import uuid
from pathlib import Path

import pytest
import ray
from _flows import add, attempts_of, executions, named, store

from verl_workflow import workflow
from verl_workflow.errors import ErrorCode, UserError

pytestmark = pytest.mark.usefixtures("flows")

MODULE = """
from _flows import Refused, mark

def base(folder):
    mark(folder, "base")
    return 1

def other(folder):
    mark(folder, "other")
    return 10

def last(folder, base, other):
    mark(folder, "last")
    if not (folder / "mended").exists():
        raise Refused
    return base + other
"""


@pytest.fixture
def failed(marks: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A failed workflow of functions of a module, with two finished steps; gives the module's file."""
    # Another name for each test: workers keep the modules that they have loaded.
    file = tmp_path / f"flow_{uuid.uuid4().hex}.py"
    file.write_text(MODULE)
    monkeypatch.syspath_prepend(str(tmp_path))
    module = importlib.import_module(file.stem)
    steps = {name: ray.remote(getattr(module, name)).options(**named(name)) for name in ("base", "other", "last")}
    with pytest.raises(workflow.WorkflowExecutionError):
        workflow.run(steps["last"].bind(marks, steps["base"].bind(marks), steps["other"].bind(marks)), workflow_id="w")
    (marks / "mended").touch()
    return file


def change(file: Path) -> None:
    file.write_text(MODULE.replace("return 1\n", "return 1 + 0\n"))


def counts(marks: Path) -> dict[str, int]:
    return {name: executions(marks, name) for name in ("base", "other", "last")}


def test_code_that_has_not_changed_is_no_reason_to_fail(failed: Path, marks: Path) -> None:
    assert workflow.resume("w", on_code_change="fail") == 11
    assert counts(marks) == {"base": 1, "other": 1, "last": 2}


def test_a_change_of_code_is_accepted_by_default_and_values_are_kept(failed: Path, marks: Path) -> None:
    change(failed)
    assert workflow.resume("w") == 11
    assert counts(marks) == {"base": 1, "other": 1, "last": 2}


def test_a_change_of_code_can_be_refused_and_nothing_is_written(failed: Path, flows: Path, marks: Path) -> None:
    change(failed)
    before = sorted(flows.rglob("journal/*"))
    with pytest.raises(UserError) as refused:
        workflow.resume("w", on_code_change="fail")
    assert refused.value.code is ErrorCode.DEFINITION_CHANGED
    assert refused.value.value == ["base"]
    assert workflow.get_status("w") is workflow.FAILED
    assert sorted(flows.rglob("journal/*")) == before
    assert counts(marks) == {"base": 1, "other": 1, "last": 1}


def test_steps_whose_code_has_changed_can_be_run_again_and_only_those(failed: Path, marks: Path) -> None:
    change(failed)
    assert workflow.resume("w", on_code_change="rerun") == 11
    assert counts(marks) == {"base": 2, "other": 1, "last": 2}
    assert attempts_of("w", "base") == [(1, "succeeded"), (2, "succeeded")]


def test_what_depends_on_changed_steps_is_run_again_too(failed: Path, marks: Path) -> None:
    (marks / "mended").unlink()
    with pytest.raises(workflow.WorkflowExecutionError):
        workflow.resume("w")
    (marks / "mended").touch()
    change(failed)
    assert workflow.resume("w", on_code_change="rerun") == 11
    assert counts(marks) == {"base": 2, "other": 1, "last": 3}


def test_on_code_change_has_three_values() -> None:
    workflow.run(add.bind(1, 2), workflow_id="w")
    with pytest.raises(ValueError, match="on_code_change has to be accept, rerun or fail"):
        workflow.resume("w", on_code_change="ignore")  # type: ignore[arg-type]


def test_what_was_run_again_is_not_taken_for_changed_any_more(failed: Path, marks: Path) -> None:
    (marks / "mended").unlink()
    change(failed)
    with pytest.raises(workflow.WorkflowExecutionError):
        workflow.resume("w", on_code_change="rerun")
    (marks / "mended").touch()
    assert workflow.resume("w", on_code_change="fail") == 11
    assert counts(marks) == {"base": 2, "other": 1, "last": 3}


RETURNING = """
import ray
from _flows import Refused
from verl_workflow import workflow

@workflow.options(task_id="inner")
@ray.remote
def inner(value):
    return value

@workflow.options(task_id="outer")
@ray.remote
def outer():
    return workflow.continuation(inner.bind(1))

@workflow.options(task_id="last")
@ray.remote
def last(folder, value):
    if not (folder / "mended").exists():
        raise Refused
    return value
"""


def test_a_step_that_is_run_again_returns_its_steps_anew_under_their_names(
    marks: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / f"flow_{uuid.uuid4().hex}.py"
    file.write_text(RETURNING)
    monkeypatch.syspath_prepend(str(tmp_path))
    module = importlib.import_module(file.stem)
    with pytest.raises(workflow.WorkflowExecutionError):
        workflow.run(module.last.bind(marks, module.outer.bind()), workflow_id="w")
    assert workflow.get_output("w", task_id="inner") == 1
    file.write_text(RETURNING.replace("inner.bind(1)", "inner.bind(1 + 1)"))
    (marks / "mended").touch()
    assert workflow.resume("w", on_code_change="rerun") == 2
    assert workflow.get_output("w", task_id="inner") == 2
    assert list(workflow.read_run(store(), "w").steps) == ["outer", "last", "inner"]
    # Never given twice, whatever becomes of a step.
    assert attempts_of("w", "inner") == [(2, "succeeded")]
