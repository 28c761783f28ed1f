"""Workflows on a real cluster that are gone on with, looked at, stopped and removed."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import ray
from _flows import (
    Refused,
    add,
    end_hosts,
    executions,
    gather,
    go,
    mark,
    marked,
    named,
    refusing_until,
    started,
    store,
    until,
    waiting,
    waits_for,
)

from verl_workflow import workflow
from verl_workflow.storage import Store
from verl_workflow.workflow._dag import DagView, is_node
from verl_workflow.workflow._definition import run_key
from verl_workflow.workflow._graph import graph_of

pytestmark = pytest.mark.usefixtures("flows")


# Continuations


def test_a_continuation_becomes_the_value_of_the_step() -> None:
    @ray.remote
    def factorial(n: int, so_far: int = 1) -> Any:
        return so_far if n < 2 else workflow.continuation(factorial.bind(n - 1, so_far * n))

    assert workflow.run(add.bind(factorial.options(**named("top")).bind(10), 1), workflow_id="w") == 3628801
    assert workflow.get_output("w", task_id="top") == 3628800


def test_hundreds_of_continuations_in_a_row() -> None:
    @ray.remote
    def count(n: int, end: int) -> Any:
        return n if n == end else workflow.continuation(count.bind(n + 1, end))

    assert workflow.run(count.bind(0, 300), workflow_id="w") == 300
    assert workflow.get_output("w") == 300


def test_a_continuation_goes_on_at_its_frontier(marks: Path) -> None:
    @ray.remote
    def count(folder: Path, n: int) -> Any:
        mark(folder, f"at{n}")
        if n == 3 and not (folder / "mended").exists():
            raise Refused
        return n if n == 5 else workflow.continuation(count.bind(folder, n + 1))

    with pytest.raises(workflow.WorkflowExecutionError):
        workflow.run(count.bind(marks, 0), workflow_id="w")
    (marks / "mended").touch()
    assert workflow.resume("w") == 5
    assert [executions(marks, f"at{n}") for n in range(6)] == [1, 1, 1, 2, 1, 1]


def test_a_continuation_outside_of_a_workflow_is_executed_at_once(flows: Path) -> None:
    @ray.remote
    def count(n: int) -> Any:
        return n if n == 3 else workflow.continuation(count.bind(n + 1))

    assert workflow.continuation(add.bind(add.bind(1, 2), 3)) == 6
    assert workflow.continuation(gather.bind([add.bind(1, 2), add.bind(3, 4)])) == [3, 7]
    assert workflow.continuation(count.bind(0)) == 3
    assert ray.get(count.remote(0)) == 3
    assert workflow.list_all() == []
    with pytest.raises(TypeError, match=r"Input should be a DAG\."):
        workflow.continuation(5)


def test_chains_of_thousands_of_nodes_can_be_recorded(tmp_path: Path) -> None:
    node = add.bind(0, 0)
    for _ in range(3_000):
        node = add.bind(node, 1)
    graph = graph_of(node, DagView(), Store(str(tmp_path / "graphs")), "objects", is_node=is_node)
    assert len(graph.nodes) == 3_001
    assert [node.after for node in graph.nodes] == [(), *((n,) for n in range(3_000))]


# Taking up


def test_resume_executes_what_is_left_and_nothing_else(marks: Path) -> None:
    first = marked.bind(marks, "first", 1)
    dag = add.bind(first, refusing_until.bind(marks, "second", "mended", 2))
    with pytest.raises(workflow.WorkflowExecutionError):
        workflow.run(dag, workflow_id="w")
    (marks / "mended").touch()
    assert workflow.resume("w") == 3
    assert workflow.get_status("w") is workflow.SUCCESSFUL
    assert (executions(marks, "first"), executions(marks, "second")) == (1, 2)
    assert workflow.resume("w") == 3
    assert ray.get(workflow.resume_async("w")) == 3
    assert executions(marks, "second") == 2


def test_resume_async_gives_a_reference(marks: Path) -> None:
    with pytest.raises(workflow.WorkflowExecutionError):
        workflow.run(refusing_until.bind(marks, "a", "mended", 9), workflow_id="w")
    (marks / "mended").touch()
    ref = workflow.resume_async("w")
    assert isinstance(ref, ray.ObjectRef)
    assert ray.get(ref) == 9


def test_run_of_a_failed_id_takes_it_up(marks: Path) -> None:
    dag = add.bind(marked.bind(marks, "first", 1), refusing_until.bind(marks, "second", "mended", 2))
    with pytest.raises(workflow.WorkflowExecutionError):
        workflow.run(dag, workflow_id="w")
    (marks / "mended").touch()
    assert workflow.run(dag, workflow_id="w") == 3
    assert executions(marks, "first") == 1


def test_resume_of_an_unknown_id_is_an_error_and_writes_nothing(flows: Path) -> None:
    before = sorted(flows.rglob("*"))
    for ask in (workflow.resume, workflow.resume_async, workflow.get_output, workflow.get_status, workflow.cancel):
        with pytest.raises(workflow.WorkflowNotFoundError, match=r"Workflow\[id=nowhere\] was referenced but doesn't"):
            ask("nowhere")
    with pytest.raises(ValueError):
        workflow.get_status("nowhere")
    assert [path for path in sorted(flows.rglob("*")) if "nowhere" in path.name or path not in before] == []


def test_resume_all_takes_up_what_nobody_runs_and_failed_ones_when_asked(marks: Path) -> None:
    @ray.remote
    def first_waits(folder: Path) -> str:
        if executions(folder, "lost") == 0:
            waits_for(folder, "lost")
        mark(folder, "lost")
        return "lost"

    with pytest.raises(workflow.WorkflowExecutionError):
        workflow.run(refusing_until.bind(marks, "bad", "mended", "bad"), workflow_id="bad")
    workflow.run(add.bind(1, 1), workflow_id="done")
    workflow.run_async(first_waits.bind(marks), workflow_id="lost")
    started(marks, "lost")
    end_hosts()
    until(lambda: workflow.get_status("lost") is workflow.RESUMABLE, "resumable workflow")
    with pytest.raises(ValueError, match="nobody runs it"):
        workflow.get_output("lost")

    assert [(name, ray.get(ref)) for name, ref in workflow.resume_all()] == [("lost", "lost")]
    assert workflow.get_status("bad") is workflow.FAILED
    (marks / "mended").touch()
    assert [(name, ray.get(ref)) for name, ref in workflow.resume_all(include_failed=True)] == [("bad", "bad")]
    assert workflow.resume_all(include_failed=True) == []


# Looking


def test_get_output_waits_for_a_running_workflow_and_for_its_steps(marks: Path) -> None:
    quick = marked.options(**named("quick")).bind(marks, "quick", 1)
    ref = workflow.run_async(waiting.options(**named("slow")).bind(marks, "slow", 2, quick), workflow_id="w")
    assert workflow.get_output("w", task_id="quick") == 1
    whole = workflow.get_output_async("w")
    slow = workflow.get_output_async("w", task_id="slow")
    started(marks, "slow")
    assert ray.wait([whole, slow], timeout=0.3)[0] == []
    go(marks)
    assert ray.get([whole, slow, ref]) == [2, 2, 2]


def test_get_output_of_a_step_that_is_not_there_is_an_error() -> None:
    workflow.run(add.bind(1, 2), workflow_id="w")
    with pytest.raises(ValueError, match="No such task_id 'y' in workflow 'w'"):
        workflow.get_output("w", task_id="y")


def test_get_output_of_a_failed_workflow_raises_and_finished_steps_stay_readable(marks: Path) -> None:
    first = marked.options(**named("first")).bind(marks, "first", 1)
    with pytest.raises(workflow.WorkflowExecutionError):
        workflow.run(add.bind(first, refusing_until.bind(marks, "second", "mended")), workflow_id="w")
    with pytest.raises(workflow.WorkflowExecutionError) as failed:
        workflow.get_output("w")
    assert type(failed.value.__cause__) is Refused
    assert workflow.get_output("w", task_id="first") == 1


def test_list_all_sorts_and_filters(marks: Path) -> None:
    workflow.run(add.bind(1, 2), workflow_id="b")
    workflow.run(add.bind(1, 2), workflow_id="a")
    with pytest.raises(workflow.WorkflowExecutionError):
        workflow.run(refusing_until.bind(marks, "bad", "never"), workflow_id="c")
    good = [("a", workflow.SUCCESSFUL), ("b", workflow.SUCCESSFUL)]
    bad = [("c", workflow.FAILED)]
    assert workflow.list_all() == good + bad
    assert workflow.list_all("SUCCESSFUL") == workflow.list_all(workflow.SUCCESSFUL) == good
    assert workflow.list_all({"FAILED"}) == workflow.list_all({workflow.FAILED}) == bad
    assert workflow.list_all({"FAILED", "SUCCESSFUL"}) == good + bad
    assert workflow.list_all(set()) == workflow.list_all("RUNNING") == []


def test_list_all_refuses_filters_that_name_no_status() -> None:
    for unknown in ("DONE", "", {"FAILED", "DONE"}):
        with pytest.raises(ValueError):
            workflow.list_all(unknown)
    for wrong in (["FAILED"], 5, {5}):
        with pytest.raises(TypeError, match="status_filter must be WorkflowStatus or a set of WorkflowStatus"):
            workflow.list_all(wrong)  # type: ignore[arg-type]


def test_metadata_of_a_workflow() -> None:
    before = time.time()
    workflow.run(add.bind(1, 2), workflow_id="w", metadata={"who": "me", "n": [1]})
    found = workflow.get_metadata("w")
    assert found["status"] == "SUCCESSFUL"
    assert found["user_metadata"] == {"who": "me", "n": [1]}
    assert set(found) == {"status", "user_metadata", "stats"}
    assert before <= found["stats"]["start_time"] <= found["stats"]["end_time"] <= time.time()


def test_metadata_of_a_step(marks: Path) -> None:
    first = add.options(**named("first", metadata={"k": "v"})).bind(1, 2)
    second = add.options(max_retries=7, **named("second", catch_exceptions=True)).bind(first, 4)
    workflow.run(second, workflow_id="w")
    found = workflow.get_metadata("w", "first")
    assert set(found) == {"task_id", "task_options", "user_metadata", "workflow_refs", "stats", "attempts"}
    assert (found["task_id"], found["user_metadata"], found["workflow_refs"]) == ("first", {"k": "v"}, [])
    assert found["stats"]["start_time"] <= found["stats"]["end_time"]
    assert [(each["number"], each["status"], each["error"]) for each in found["attempts"]] == [(1, "succeeded", None)]
    options = workflow.get_metadata("w", "second")["task_options"]
    assert (options["max_retries"], options["catch_exceptions"], options["checkpoint"]) == (7, True, True)
    assert (options["retry"]["attempts"], options["retry"]["crashes"]) == (1, 7)
    assert workflow.get_metadata("w", "second")["workflow_refs"] == ["first"]
    assert workflow.get_metadata("w", "second")["user_metadata"] == {}


def test_metadata_while_it_runs_and_after_it_has_failed(marks: Path) -> None:
    ref = workflow.run_async(waiting.options(**named("a")).bind(marks, "a"), workflow_id="w")
    started(marks, "a")
    assert workflow.get_metadata("w")["status"] == "RUNNING"
    assert set(workflow.get_metadata("w")["stats"]) == {"start_time"}
    assert set(workflow.get_metadata("w", "a")["stats"]) == {"start_time"}
    go(marks)
    ray.get(ref)
    with pytest.raises(workflow.WorkflowExecutionError):
        workflow.run(refusing_until.options(**named("bad")).bind(marks, "bad", "never"), workflow_id="f")
    assert workflow.get_metadata("f")["status"] == "FAILED"
    assert "Refused: no never" in workflow.get_metadata("f", "bad")["attempts"][0]["error"]


def test_metadata_of_what_is_not_there_says_so_in_the_known_words() -> None:
    workflow.run(add.bind(1, 2), workflow_id="x")
    with pytest.raises(ValueError, match=r"^No such workflow_id 'nowhere'$"):
        workflow.get_metadata("nowhere")
    with pytest.raises(ValueError, match=r"^No such workflow_id 'nowhere'$"):
        workflow.get_metadata("nowhere", "y")
    with pytest.raises(ValueError, match=r"^No such task_id 'y' in workflow 'x'$"):
        workflow.get_metadata("x", "y")


def test_metadata_of_steps_of_a_continuation() -> None:
    @ray.remote
    def outer() -> Any:
        inner = add.options(**named("inner", metadata={"deep": 1})).bind(1, 2)
        return workflow.continuation(add.options(**named("last")).bind(inner, 3))

    workflow.run(outer.bind(), workflow_id="w")
    assert workflow.get_metadata("w", "inner")["user_metadata"] == {"deep": 1}
    assert workflow.get_metadata("w", "last")["workflow_refs"] == ["inner"]
    assert workflow.get_output("w", task_id="inner") == 3


def test_reading_needs_no_cluster_and_writes_nothing(flows: Path) -> None:
    workflow.run(add.options(**named("a")).bind(1, 2), workflow_id="w")
    end_hosts()
    before = {path: path.stat().st_mtime_ns for path in flows.rglob("*")}
    assert (workflow.get_output("w"), workflow.get_output("w", task_id="a")) == (3, 3)
    assert (workflow.get_status("w"), workflow.list_all()) == (workflow.SUCCESSFUL, [("w", workflow.SUCCESSFUL)])
    assert workflow.get_metadata("w")["status"] == "SUCCESSFUL"
    assert {path: path.stat().st_mtime_ns for path in flows.rglob("*")} == before
    assert store().list("hosts") != []


# Stopping and removing


def test_cancel_stops_the_running_steps_for_good(marks: Path) -> None:
    ref = workflow.run_async(waiting.bind(marks, "a"), workflow_id="w")
    started(marks, "a")
    workflow.cancel("w")
    assert workflow.get_status("w") is workflow.CANCELED
    with pytest.raises(workflow.WorkflowCancellationError):
        ray.get(ref)
    with pytest.raises(workflow.WorkflowCancellationError):
        workflow.get_output("w")
    pid = int(next(marks.glob("a.*")).read_text())
    until(lambda: not _lives(pid), "end of the step's process")
    workflow.cancel("w")
    with pytest.raises(workflow.WorkflowNotResumableError):
        workflow.resume("w")
    assert workflow.resume_all(include_failed=True) == []
    assert workflow.get_status("w") is workflow.CANCELED


def test_what_was_committed_before_a_cancel_stays_readable(marks: Path) -> None:
    first = marked.options(**named("first")).bind(marks, "first", 1)
    workflow.run_async(waiting.bind(marks, "a", None, first), workflow_id="w")
    started(marks, "a")
    workflow.cancel("w")
    assert workflow.get_output("w", task_id="first") == 1


def test_delete_removes_a_finished_workflow_whose_id_can_be_used_again(flows: Path, marks: Path) -> None:
    workflow.run(marked.bind(marks, "a", 1), workflow_id="w")
    workflow.delete("w")
    assert workflow.list_all() == []
    assert not list((flows / "runs").iterdir())
    with pytest.raises(workflow.WorkflowNotFoundError):
        workflow.delete("w")
    assert workflow.run(marked.bind(marks, "a", 2), workflow_id="w") == 2
    assert executions(marks, "a") == 2


def test_delete_of_a_running_workflow_is_refused(marks: Path) -> None:
    ref = workflow.run_async(waiting.bind(marks, "a", 1), workflow_id="w")
    started(marks, "a")
    with pytest.raises(workflow.WorkflowStillActiveError, match="is still running or pending"):
        workflow.delete("w")
    go(marks)
    assert ray.get(ref) == 1
    workflow.delete("w")


def _lives(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in {"Z", "X"}
    except OSError:
        return False


class Told(Exception):
    pass


def test_references_in_caught_errors_are_durable(flows: Path) -> None:
    @ray.remote
    def fails() -> None:
        raise Told(ray.put("kept"))

    @ray.remote
    def read(pair: tuple[None, Told]) -> Any:
        return ray.get(pair[1].args[0])

    caught = fails.options(**named("fails", catch_exceptions=True)).bind()
    assert workflow.run(read.bind(caught), workflow_id="w") == "kept"
    end_hosts()
    _, error = workflow.get_output("w", task_id="fails")
    assert ray.get(error.args[0]) == "kept"
    # Not by the worker that has made it.
    assert store().list(f"{run_key(store(), 'w').folder}/objects")
