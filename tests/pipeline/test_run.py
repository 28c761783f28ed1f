"""Pipelines of Python stages on a real, local Ray: no verl, so that the run itself is what is tested."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from verl_workflow.errors import ErrorCode, UserError, VerlWorkflowError
from verl_workflow.pipeline import Definition, _run, define, plan, resume, start
from verl_workflow.pipeline._run import Run, _pipeline_warnings
from verl_workflow.spec import load
from verl_workflow.storage import Store
from verl_workflow.workflow import RunState, RunStatus, create_run, read_run
from verl_workflow.workflow._heartbeat import Heartbeat
from verl_workflow.workflow._journal import Journal
from verl_workflow.workflow._records import Claimed


@pytest.fixture
def closing() -> Iterator[list[Run]]:
    runs: list[Run] = []
    yield runs
    for run in runs:
        run.close()


def finish(run: Run, storage: Path, *, epoch: int = 1) -> RunState:
    """The state in which the driver of that epoch leaves the run."""
    for _ in range(1200):
        state = read_run(Store(str(storage)), run.run_id)
        if state.ended_at is not None and state.epoch >= epoch:
            return state
        assert run.driver_error() is None
        time.sleep(0.1)
    raise AssertionError("the run did not end")


def test_a_run_passes_outputs_on_and_uses_its_recorded_code(project: Path, tmp_path: Path, closing: list[Run]) -> None:
    storage = tmp_path / "storage"
    definition = define(load(project / "pipeline.yaml", {"count": "5"}), run_id="r1", storage=str(storage))
    closing.append(start(definition))
    state = finish(closing[0], storage)
    assert state.status is RunStatus.SUCCEEDED, state.error
    assert state.steps["total"].value == {"total": 0 + 1 + 2 + 3 + 4 + 10}
    assert (definition.code_dir / "steps.py").read_text() == (project / "steps.py").read_text()
    # Relative paths lead to the attempt's folder, not into code that other runs share; so does what is printed.
    attempt = Path(state.steps["numbers"].value["path"]).parent
    assert (attempt / "relative.txt").exists()
    assert (attempt / "log.txt").read_text() == "wrote 5 numbers\n"

    with pytest.raises(UserError) as caught:
        start(definition)
    assert caught.value.code is ErrorCode.RUN_EXISTS
    with pytest.raises(UserError) as caught:
        resume(str(storage), "r1")
    assert caught.value.code is ErrorCode.RUN_TERMINAL


def test_a_failed_run_is_resumed_with_its_recorded_code_and_says_so(
    project: Path, tmp_path: Path, closing: list[Run]
) -> None:
    storage = tmp_path / "storage"
    flag = tmp_path / "repaired"
    (project / "steps.py").write_text(
        (project / "steps.py")
        .read_text()
        .replace("    with open(path)", f"    open({str(flag)!r}).close()\n    with open(path)")
    )
    text = (
        (project / "pipeline.yaml")
        .read_text()
        .replace(
            "kind: python\n    function: steps.py:total",
            "kind: python\n    retry: {attempts: 1}\n    function: steps.py:total",
        )
    )
    (project / "pipeline.yaml").write_text(text)
    run = start(define(load(project / "pipeline.yaml", {}), run_id="r2", storage=str(storage)))
    try:
        state = finish(run, storage)
        assert state.status is RunStatus.FAILED
        assert "repaired" in str(state.error)
    finally:
        run.close()

    flag.touch()
    (project / "sums.py").write_text("def add(numbers):\n    return -1\n")
    (project / "pipeline.yaml").write_text(text.replace("extra: 10", "extra: 20"))
    closing.append(resume(str(storage), "r2"))
    assert any("sums.py" in warning for warning in closing[0].warnings)
    assert any("pipeline.yaml has changed" in warning for warning in closing[0].warnings)
    state = finish(closing[0], storage, epoch=2)
    assert state.status is RunStatus.SUCCEEDED, state.error
    assert state.steps["total"].value == {"total": 0 + 1 + 2 + 3 + 10}
    assert len(state.steps["numbers"].attempts) == 1


def test_code_that_changes_while_a_run_is_started_is_refused_and_leaves_nothing(project: Path, tmp_path: Path) -> None:
    definition = define(load(project / "pipeline.yaml", {}), run_id="r3", storage=str(tmp_path / "storage"))
    (project / "sums.py").write_text("def add(numbers):\n    return -1\n")
    with pytest.raises(UserError, match="changed while the run was being started"):
        start(definition)
    assert [path for path in (tmp_path / "storage").rglob("*") if path.is_file()] == []


def test_a_cluster_that_does_not_answer_leaves_nothing(project: Path, tmp_path: Path) -> None:
    definition = define(load(project / "pipeline.yaml", {}), run_id="r5", storage=str(tmp_path / "storage"))
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        with pytest.raises(VerlWorkflowError) as caught:
            start(definition, address=f"127.0.0.1:{taken.getsockname()[1]}")
    assert caught.value.code is ErrorCode.CLUSTER_UNREACHABLE
    assert [path for path in (tmp_path / "storage").rglob("*") if path.is_file()] == []


def test_a_run_whose_driver_is_alive_is_not_resumed_and_no_cluster_started(
    project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    definition = define(load(project / "pipeline.yaml", {}), run_id="r6", storage=str(tmp_path / "storage"))
    store = Store(definition.storage)
    key = create_run(store, "r6", definition.to_json())
    journal = Journal(store, key)
    journal.read()
    owner = {"pid": 1, "host": "elsewhere"}
    assert journal.claim(Claimed(owner=owner, steps=[]))
    monkeypatch.setattr(_run, "connect", lambda *_, **__: pytest.fail("a cluster was joined"))
    with Heartbeat(store, key, epoch=1, owner=owner, interval_s=0.1), pytest.raises(UserError) as caught:
        resume(str(tmp_path / "storage"), "r6")
    assert caught.value.code is ErrorCode.RUN_OWNED
    assert "process 1 on elsewhere" in str(caught.value)


def test_an_id_whose_deleted_run_has_left_files_is_refused(project: Path, tmp_path: Path) -> None:
    """Its trainings would go on from those checkpoints."""
    definition = define(load(project / "pipeline.yaml", {}), run_id="r4", storage=str(tmp_path / "storage"))
    (definition.artifacts / "runs" / "r4" / "stages" / "train").mkdir(parents=True)
    with pytest.raises(UserError, match="files of a deleted run of this id are left") as caught:
        start(definition)
    assert (caught.value.code, caught.value.value) == (ErrorCode.RUN_EXISTS, "r4")
    assert not [path for path in (tmp_path / "storage").rglob("*") if path.is_file()]


@pytest.mark.parametrize("params", [{}, {"count": "7"}])
def test_a_file_that_has_not_changed_gives_no_warning(project: Path, tmp_path: Path, params: dict[str, str]) -> None:
    definition = define(load(project / "pipeline.yaml", params), storage=str(tmp_path / "storage"))
    stored = Definition.from_json(json.loads(json.dumps(definition.to_json())))
    assert _pipeline_warnings(stored) == ()
    (project / "pipeline.yaml").write_text((project / "pipeline.yaml").read_text().replace("extra: 10", "extra: 20"))
    (warning,) = _pipeline_warnings(stored)
    assert "pipeline.yaml has changed since the run was started" in warning
    (project / "pipeline.yaml").write_text("stages: [")
    assert _pipeline_warnings(stored) == (warning,)


def test_resuming_an_unknown_run_creates_nothing(tmp_path: Path) -> None:
    with pytest.raises(UserError) as caught:
        resume(str(tmp_path / "storage"), "never-started")
    assert caught.value.code is ErrorCode.RUN_UNKNOWN
    assert not (tmp_path / "storage").exists()


def test_the_plan_of_stages_that_are_never_reused(project: Path, tmp_path: Path) -> None:
    report = plan(load(project / "pipeline.yaml", {}), storage=str(tmp_path / "storage"))
    assert [(row.stage, row.action) for row in report.rows] == [("numbers", "run"), ("total", "run")]
    assert report.problems == ()
    assert not (tmp_path / "storage").exists()
