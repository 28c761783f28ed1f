"""`run` and `resume` from input to exit code, the driver in a thread of this process instead of a Ray actor."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from _runs import Invoke, Runs

from verl_workflow import code
from verl_workflow.errors import ErrorCode, UserError, VerlWorkflowError
from verl_workflow.pipeline import Definition
from verl_workflow.pipeline._compile import compile_plan
from verl_workflow.storage import Store
from verl_workflow.workflow import Driver, InlineLauncher, create_run, read_run, request_cancel

STEPS = """
import pathlib
import time


def first(count):
    return {"count": count}


def second(count, context):
    if pathlib.Path(WAIT).exists():
        for _ in range(600):
            time.sleep(0.1)
    if pathlib.Path(BROKEN).exists():
        raise RuntimeError("the disk is full")
    return {"total": 2 * count}
"""

PIPELINE = """\
version: 1
name: sums
params:
  count: {type: integer, default: 4}
stages:
  first:
    kind: python
    function: steps.py:first
    args: {count: "${params.count}"}
  second:
    kind: python
    function: steps.py:second
    retry: {attempts: 1}
    args: {count: "${first.count}"}
"""


@dataclass
class InlineRun:
    run_id: str
    storage: str
    driver: threading.Thread
    local: bool = True
    warnings: tuple[str, ...] = ()
    closed: bool = False

    def driver_error(self) -> object | None:
        return None

    def close(self) -> None:
        self.closed = True


class Started:
    """Replaces what starts drivers on Ray; remembers what was started."""

    def __init__(self) -> None:
        self.runs: list[InlineRun] = []
        self.change: Callable[[InlineRun], None] = lambda run: None

    def start(self, definition: Definition, *, address: str | None = None) -> InlineRun:
        store = Store(definition.storage)
        code.snapshot(definition.pipeline, definition.base_dir, definition.code_dir)
        create_run(store, definition.run_id, definition.to_json())
        return self._drive(definition)

    def resume(self, storage: str, run_id: str, *, address: str | None = None, force: bool = False) -> InlineRun:
        state = read_run(Store(storage), run_id)
        return self._drive(Definition.from_json(state.definition))

    def _drive(self, definition: Definition) -> InlineRun:
        driver = Driver(
            store=Store(definition.storage),
            run_id=definition.run_id,
            plan=compile_plan(definition),
            launcher=InlineLauncher(),
        )
        run = InlineRun(definition.run_id, definition.storage, threading.Thread(target=driver.run, daemon=True))
        self.change(run)
        run.driver.start()
        self.runs.append(run)
        return run


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> Started:
    started = Started()
    monkeypatch.setattr("verl_workflow.pipeline.start", started.start)
    monkeypatch.setattr("verl_workflow.pipeline.resume", started.resume)
    return started


@pytest.fixture
def pipeline(runs: Runs) -> Path:
    folder = runs.folder / "project"
    folder.mkdir()
    places = {"WAIT": str(runs.folder / "wait"), "BROKEN": str(runs.folder / "broken")}
    text = STEPS
    for name, place in places.items():
        text = text.replace(f"({name})", f"({place!r})")
    (folder / "steps.py").write_text(text)
    (folder / "pipeline.yaml").write_text(PIPELINE)
    return folder / "pipeline.yaml"


def tree(folder: Path) -> list[str]:
    return sorted(str(path) for path in folder.rglob("*") if "__pycache__" not in path.parts)


def test_a_run_shows_changes_on_stderr_and_its_result_on_stdout(
    runs: Runs, invoke: Invoke, started: Started, pipeline: Path
) -> None:
    shown = invoke("run", str(pipeline), "-p", "count=7", "--run-id", "r1")
    assert shown.exit_code == 0, shown.output
    lines = shown.stdout.splitlines()
    assert lines[0].startswith("run r1: succeeded after 0:0")
    assert lines[1].startswith('  first     {"count": 7} (0:0')
    assert lines[2].startswith('  second    {"total": 14} (0:0')
    assert shown.stderr.splitlines()[0] == "run r1: starting Ray on this machine"
    assert "second: succeeded" in shown.stderr
    assert "resume with" not in shown.output
    assert started.runs[0].closed


def test_run_as_json_prints_one_document(invoke: Invoke, started: Started, pipeline: Path) -> None:
    shown = invoke("run", str(pipeline), "--json", "--quiet")
    assert shown.exit_code == 0
    found = json.loads(shown.stdout)
    assert (found["status"], found["driver_error"], found["pipeline"]) == ("succeeded", None, "sums")
    assert [stage["value"] for stage in found["stages"]] == [{"count": 4}, {"total": 8}]
    assert shown.stderr == ""


def test_a_failed_run_exits_with_1_and_is_resumed_past_its_old_end(
    runs: Runs, invoke: Invoke, started: Started, pipeline: Path
) -> None:
    (runs.folder / "broken").touch()
    shown = invoke("run", str(pipeline), "--run-id", "r1")
    assert shown.exit_code == 1
    assert "error: second: RuntimeError: the disk is full" in shown.stderr
    assert 'raise RuntimeError("the disk is full")' in shown.stderr
    assert shown.stderr.splitlines()[-1] == f"resume with: verl-workflow resume r1 --storage {runs.path}"
    assert "first     " in shown.stdout

    (runs.folder / "broken").unlink()
    shown = invoke("resume", "r1")
    assert shown.exit_code == 0, shown.output
    assert "error" not in shown.output
    state = read_run(runs.store, "r1")
    assert [len(step.attempts) for step in state.steps.values()] == [1, 2]


def test_a_cancelled_run_exits_with_3(runs: Runs, invoke: Invoke, started: Started, pipeline: Path) -> None:
    (runs.folder / "wait").touch()
    started.change = lambda run: threading.Timer(2.0, request_cancel, (runs.store, "r1")).start()
    shown = invoke("run", str(pipeline), "--run-id", "r1")
    assert shown.exit_code == 3, shown.output
    assert shown.stdout.startswith("run r1: cancelled")
    assert "resume with" not in shown.output


def test_ctrl_c_stops_a_local_run_and_says_how_to_resume(
    runs: Runs, invoke: Invoke, started: Started, pipeline: Path
) -> None:
    (runs.folder / "wait").touch()

    def interrupted() -> Any:
        raise KeyboardInterrupt

    started.change = lambda run: setattr(run, "driver_error", interrupted)
    shown = invoke("run", str(pipeline), "--run-id", "r1")
    assert shown.exit_code == 130
    assert shown.stderr.splitlines()[-2:] == [
        "stopped run r1; what has been done is kept",
        f"resume with: verl-workflow resume r1 --storage {runs.path}",
    ]
    assert started.runs[0].closed


def test_ctrl_c_leaves_a_run_in_a_cluster_alone(runs: Runs, invoke: Invoke, started: Started, pipeline: Path) -> None:
    (runs.folder / "wait").touch()

    def interrupted() -> Any:
        raise KeyboardInterrupt

    def change(run: InlineRun) -> None:
        run.local = False
        run.driver_error = interrupted  # type: ignore[method-assign]

    started.change = change
    shown = invoke("run", str(pipeline), "--run-id", "r1", "--address", "head:6379")
    assert shown.exit_code == 130
    assert "goes on in the cluster" in shown.stderr
    assert f"stop it with: verl-workflow cancel r1 --storage {runs.path}" in shown.stderr


def test_a_lost_driver_exits_with_1_and_says_how_to_resume(
    runs: Runs, invoke: Invoke, started: Started, pipeline: Path
) -> None:
    (runs.folder / "wait").touch()
    lost = VerlWorkflowError(ErrorCode.CLUSTER_UNREACHABLE, "the head of the Ray cluster is gone")
    started.change = lambda run: setattr(run, "driver_error", lambda: lost)
    shown = invoke("run", str(pipeline), "--run-id", "r1", "--json")
    assert shown.exit_code == 1
    assert json.loads(shown.stdout)["driver_error"] == "the head of the Ray cluster is gone"
    assert "error: the head of the Ray cluster is gone" in shown.stderr
    assert shown.stderr.splitlines()[-1].startswith("resume with: verl-workflow resume r1")


def test_a_run_that_ends_after_its_head_is_lost_is_told_as_it_ended(
    runs: Runs, invoke: Invoke, started: Started, pipeline: Path
) -> None:
    """A driver works on without a head; what the command tells must still be true when it has exited."""
    wait = runs.folder / "wait"
    wait.touch()
    lost = VerlWorkflowError(ErrorCode.CLUSTER_UNREACHABLE, "the head of the Ray cluster is gone")

    def lose(run: InlineRun) -> None:
        def close() -> None:
            wait.unlink(missing_ok=True)
            run.driver.join(30)

        run.driver_error = lambda: lost  # type: ignore[method-assign]
        run.close = close  # type: ignore[method-assign]

    started.change = lose
    shown = invoke("run", str(pipeline), "--run-id", "r1", "--json")
    assert shown.exit_code == 0
    assert json.loads(shown.stdout)["driver_error"] is None
    assert "resume with" not in shown.stderr


def test_a_run_that_another_driver_has_is_a_user_error(
    runs: Runs, invoke: Invoke, started: Started, pipeline: Path
) -> None:
    (runs.folder / "wait").touch()
    owned = UserError(ErrorCode.RUN_OWNED, "another driver is working on this run", remedy="Use --force.")
    started.change = lambda run: setattr(run, "driver_error", lambda: owned)
    shown = invoke("run", str(pipeline), "--run-id", "r1")
    assert shown.exit_code == 2
    assert shown.stderr.splitlines()[-1] == "error: another driver is working on this run. Use --force."


def test_an_unforeseen_exception_keeps_its_traceback(invoke: Invoke, started: Started, pipeline: Path) -> None:
    def broken(run: InlineRun) -> None:
        raise RuntimeError("a bug of ours")

    started.change = broken
    shown = invoke("run", str(pipeline))
    assert shown.exit_code == 1
    assert isinstance(shown.exception, RuntimeError)


MISTAKES = {
    "an unknown kind": ("kind: python", "kind: pithon", "pipeline.yaml:7:"),
    "an unknown key": ("function: steps.py:first", "functoin: steps.py:first", "did you mean"),
    "a cycle": ('count: "${params.count}"', 'count: "${second.total}"', "pipeline.yaml:"),
    "a missing file": ("steps.py:first", "gone.py:first", "gone.py"),
    "an unknown stage": ("${first.count}", "${fisrt.count}", "first"),
    "a wrong type": ("retry: {attempts: 1}", "retry: {attempts: many}", "many"),
}


@pytest.mark.parametrize("verb", ["validate", "plan", "run"])
@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistakes_in_the_file_exit_with_2_name_their_place_and_write_nothing(
    runs: Runs, invoke: Invoke, pipeline: Path, verb: str, mistake: str
) -> None:
    old, new, told = MISTAKES[mistake]
    pipeline.write_text(PIPELINE.replace(old, new, 1))
    before = tree(runs.folder)
    shown = invoke(verb, str(pipeline))
    assert shown.exit_code == 2, shown.output
    assert shown.stdout == ""
    assert all(line.startswith("error: ") for line in shown.stderr.splitlines())
    assert "pipeline.yaml:" in shown.stderr
    assert told.lower() in shown.stderr.lower()
    assert tree(runs.folder) == before


def test_mistakes_are_told_all_at_once(runs: Runs, invoke: Invoke, pipeline: Path) -> None:
    pipeline.write_text(PIPELINE.replace("kind: python", "kind: pithon").replace("version: 1", "verson: 1"))
    shown = invoke("validate", str(pipeline), "--json")
    assert shown.exit_code == 2
    assert len(shown.stderr.splitlines()) >= 3
    assert len(json.loads(shown.stdout)["error"]["errors"]) == len(shown.stderr.splitlines())


@pytest.mark.parametrize(
    "arguments",
    [
        ("run", "gone.yaml"),
        ("run", "project/pipeline.yaml", "--run-id", "../x"),
        ("run", "project/pipeline.yaml", "-p", "cuont=3"),
        ("run", "project/pipeline.yaml", "-p", "count=many"),
        ("run", "project/pipeline.yaml", "-p", "count"),
        ("run", "project/pipeline.yaml", "--detach"),
        ("run", "project/pipeline.yaml", "--storage", "ftp://x"),
        ("resume", "unknown"),
        ("resume", "../x"),
    ],
)
def test_mistakes_on_the_command_line_exit_with_2_and_write_nothing(
    runs: Runs, invoke: Invoke, pipeline: Path, arguments: tuple[str, ...]
) -> None:
    before = tree(runs.folder)
    shown = invoke(*arguments)
    assert shown.exit_code == 2, shown.output
    assert shown.stderr.startswith("error: ")
    assert "Traceback" not in shown.output
    assert tree(runs.folder) == before


def test_a_taken_run_id_is_refused(runs: Runs, invoke: Invoke, started: Started, pipeline: Path) -> None:
    assert invoke("run", str(pipeline), "--run-id", "r1").exit_code == 0
    shown = invoke("run", str(pipeline), "--run-id", "r1")
    assert shown.exit_code == 2
    assert "exists already" in shown.stderr


def test_a_plan_says_what_runs_and_writes_nothing(runs: Runs, invoke: Invoke, pipeline: Path) -> None:
    before = tree(runs.folder)
    shown = invoke("plan", str(pipeline))
    assert shown.exit_code == 0, shown.output
    rows = [line.split() for line in shown.stdout.splitlines()]
    assert rows[0] == ["stage", "kind", "action", "needs", "why"]
    assert [row[:3] for row in rows[1:3]] == [["first", "python", "run"], ["second", "python", "run"]]
    assert rows[1][3:5] == ["1", "CPU"]
    found = json.loads(invoke("plan", str(pipeline), "--json").stdout)
    assert [row["action"] for row in found["rows"]] == ["run", "run"]
    assert tree(runs.folder) == before


def test_resuming_a_succeeded_run_tells_its_result_and_starts_nothing(
    runs: Runs, invoke: Invoke, pipeline: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started = Started()
    with monkeypatch.context() as patched:
        patched.setattr("verl_workflow.pipeline.start", started.start)
        assert invoke("run", str(pipeline), "--run-id", "r1").exit_code == 0
    before = tree(runs.folder)
    shown = invoke("resume", "r1")
    assert shown.exit_code == 0
    assert "succeeded already" in shown.stderr
    assert shown.stdout.startswith("run r1: succeeded")
    assert json.loads(invoke("resume", "r1", "--json").stdout)["status"] == "succeeded"
    assert tree(runs.folder) == before


def test_a_run_that_succeeds_while_its_resumption_begins_is_told_as_succeeded(
    runs: Runs, invoke: Invoke, started: Started, pipeline: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (runs.folder / "broken").touch()
    assert invoke("run", str(pipeline), "--run-id", "r1").exit_code == 1
    (runs.folder / "broken").unlink()

    def resume(storage: str, run_id: str, *, address: str | None = None, force: bool = False) -> None:
        started.resume(storage, run_id).driver.join(30)
        raise UserError(ErrorCode.RUN_TERMINAL, "the run has succeeded already", where=run_id)

    monkeypatch.setattr("verl_workflow.pipeline.resume", resume)
    shown = invoke("resume", "r1")
    assert shown.exit_code == 0, shown.output
    assert shown.stdout.startswith("run r1: succeeded")
