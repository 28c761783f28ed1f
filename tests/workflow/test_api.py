"""The functions that users of ray.workflow know, on a real cluster."""

from __future__ import annotations

import os
import queue
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import ray
from _flows import (
    AlsoRefused,
    Refused,
    add,
    attempts_of,
    end_hosts,
    executions,
    gather,
    go,
    kill_driver,
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
from ray.dag import InputNode, MultiOutputNode

from verl_workflow import workflow
from verl_workflow.errors import ErrorCode, UserError, VerlWorkflowError
from verl_workflow.storage import Store
from verl_workflow.workflow._dag import DagView, is_node
from verl_workflow.workflow._graph import graph_of

pytestmark = pytest.mark.usefixtures("flows")


# Running, and what comes of it


def test_a_graph_is_run_and_its_value_returned() -> None:
    assert workflow.run(add.bind(add.bind(1, 2), b=add.bind(3, 4))) == 10


def test_run_async_gives_a_reference_at_once(marks: Path) -> None:
    ref = workflow.run_async(waiting.bind(marks, "a", 5), workflow_id="w")
    assert isinstance(ref, ray.ObjectRef)
    started(marks, "a")
    assert workflow.get_status("w") is workflow.RUNNING
    go(marks)
    assert ray.get(ref) == 5


def test_an_error_comes_as_the_cause_and_as_an_instance_of_the_users_class() -> None:
    @ray.remote
    def refuse() -> None:
        raise AlsoRefused("not this one")

    with pytest.raises(workflow.WorkflowExecutionError, match=r"Workflow\[id=w\] failed during execution") as caught:
        workflow.run(refuse.bind(), workflow_id="w")
    assert type(caught.value.__cause__) is AlsoRefused
    assert str(caught.value.__cause__) == "not this one"
    assert workflow.get_status("w") is workflow.FAILED


def test_an_error_of_run_async_is_a_workflow_execution_error_too() -> None:
    @ray.remote
    def refuse() -> None:
        raise Refused("no")

    ref = workflow.run_async(refuse.bind(), workflow_id="w")
    with pytest.raises(workflow.WorkflowExecutionError, match="Refused: no"):
        ray.get(ref)


def test_what_is_no_graph_is_refused_and_nothing_recorded() -> None:
    for thing in (5, add, "add"):
        with pytest.raises(TypeError, match=r"Input should be a DAG\."):
            workflow.run(thing, workflow_id="w")
    assert workflow.list_all() == []


def test_a_bad_signature_is_a_type_error_in_the_caller_and_nothing_recorded() -> None:
    for dag in (add.bind(1), add.bind(1, 2, 3), add.bind(1, b=2, c=3), add.bind(add.bind(1), 2)):
        with pytest.raises(TypeError):
            workflow.run(dag, workflow_id="w")
    assert workflow.list_all() == []


def test_several_return_values_are_refused() -> None:
    @ray.remote(num_returns=2)
    def two() -> tuple[int, int]:
        return 1, 2

    for dag in (two.bind(), add.options(num_returns=2).bind(1, 2)):
        with pytest.raises(ValueError, match=r"Workflow task can only have one return\."):
            workflow.run(dag, workflow_id="w")
    assert workflow.list_all() == []


def test_metadata_that_is_not_json_is_refused() -> None:
    with pytest.raises(ValueError, match=r"metadata must be a dict\."):
        workflow.run(add.bind(1, 2), workflow_id="w", metadata=[1])  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="metadata must be JSON serializable, instead, we got 'TypeError"):
        workflow.run(add.bind(1, 2), workflow_id="w", metadata={"x": object()})
    assert workflow.list_all() == []


def test_a_second_run_of_a_finished_id_gives_its_value_and_executes_nothing(marks: Path) -> None:
    assert workflow.run(marked.bind(marks, "a", 1), workflow_id="w") == 1
    assert workflow.run(marked.bind(marks, "b", 2), workflow_id="w") == 1
    assert ray.get(workflow.run_async(marked.bind(marks, "b", 2), workflow_id="w")) == 1
    assert (executions(marks, "a"), executions(marks, "b")) == (1, 0)


def test_a_run_or_resume_of_a_running_id_raises(marks: Path) -> None:
    ref = workflow.run_async(waiting.bind(marks, "a", 1), workflow_id="w")
    started(marks, "a")
    for again in (lambda: workflow.run(add.bind(1, 1), workflow_id="w"), lambda: workflow.resume("w")):
        with pytest.raises(RuntimeError, match="Workflow 'w' is already running or pending"):
            again()
    go(marks)
    assert ray.get(ref) == 1
    assert executions(marks, "a") == 1


def test_ids_that_cannot_be_are_refused() -> None:
    with pytest.raises(TypeError):
        workflow.run(add.bind(1, 2), workflow_id=5)  # type: ignore[arg-type]
    for workflow_id in ("", ".", "..", "x" * 201, "a\0b"):
        with pytest.raises(UserError) as refused:
            workflow.run(add.bind(1, 2), workflow_id=workflow_id)
        assert refused.value.code is ErrorCode.RUN_ID_INVALID
    assert workflow.list_all() == []


# Arguments and results


def test_the_input_node_stands_for_the_one_argument() -> None:
    with InputNode() as given:
        dag = add.bind(add.bind(given, 1), given)
    assert workflow.run(dag, 10) == 21


def test_input_attributes_stand_for_arguments_by_number_name_and_field() -> None:
    @ray.remote
    def join(a: str, b: str, c: str) -> str:
        return a + b + c

    with InputNode() as given:
        assert workflow.run(join.bind(given[0], given[1], given.last), "x", "y", last="z") == "xyz"
    with InputNode() as given:
        assert workflow.run(join.bind(given["a"], given["b"], given["a"]), {"a": "1", "b": "2"}) == "121"
    with InputNode() as given:
        assert workflow.run(join.bind(given.stem, "-", given.suffix), Path("a.b")) == "a-.b"


def test_the_input_may_lie_deeper_in_an_argument() -> None:
    @ray.remote
    def total(numbers: dict[str, list[int]]) -> int:
        return sum(numbers["all"])

    with InputNode() as given:
        assert workflow.run(total.bind({"all": [given[0], 5, given[1]]}), 1, 2) == 8


def test_input_survives_a_resume_by_which_it_is_not_given_again(marks: Path) -> None:
    with InputNode() as given:
        dag = refusing_until.bind(marks, "a", "mended", given)
    with pytest.raises(workflow.WorkflowExecutionError):
        workflow.run(dag, {"deep": [1]}, workflow_id="w")
    (marks / "mended").touch()
    assert workflow.resume("w") == {"deep": [1]}


def test_a_multi_output_node_gives_all_values_in_order() -> None:
    assert workflow.run(MultiOutputNode([add.bind(1, 2), add.bind(3, 4), add.bind(5, 6)])) == [3, 7, 11]


def test_a_shared_node_runs_once(marks: Path) -> None:
    shared = marked.bind(marks, "shared", 4)
    assert workflow.run(gather.bind([add.bind(shared, 1), add.bind(shared, shared), shared])) == [5, 8, 4]
    assert executions(marks, "shared") == 1


def test_references_are_values_as_arguments_and_stay_references_deeper() -> None:
    @ray.remote
    def kinds(direct: Any, nested: list[Any], by_name: Any) -> tuple[Any, str, Any, Any]:
        return direct, type(nested[0]).__name__, ray.get(nested[0]), by_name

    dag = kinds.bind(ray.put("a"), [ray.put("b")], by_name=ray.put("c"))
    assert workflow.run(dag) == ("a", "ObjectRef", "b", "c")


def test_steps_deeper_in_an_argument_arrive_as_references() -> None:
    @ray.remote
    def kinds(nested: dict[str, Any]) -> tuple[str, Any]:
        return type(nested["step"]).__name__, ray.get(nested["step"])

    assert workflow.run(kinds.bind({"step": add.bind(1, 2)})) == ("ObjectRef", 3)


def test_references_in_arguments_outlive_the_one_who_made_them(marks: Path) -> None:
    @ray.remote
    def late(folder: Path, direct: Any, refs: list[Any]) -> Any:
        if not (folder / "mended").exists():
            raise Refused
        return direct, ray.get(refs)

    refs = [ray.put({"n": 1}), ray.put([ray.put("inner")])]
    with pytest.raises(workflow.WorkflowExecutionError):
        workflow.run(late.bind(marks, ray.put("top"), refs), workflow_id="w")
    del refs
    end_hosts()
    (marks / "mended").touch()
    direct, (first, second) = workflow.resume("w")
    assert (direct, first, ray.get(second[0])) == ("top", {"n": 1}, "inner")


def test_references_in_results_are_durable(flows: Path) -> None:
    @ray.remote
    def make() -> dict[str, Any]:
        return {"ref": ray.put("kept"), "n": 1}

    @ray.remote
    def read(made: dict[str, Any]) -> Any:
        return ray.get(made["ref"])

    made = make.options(**named("make")).bind()
    assert workflow.run(read.bind(made), workflow_id="w") == "kept"
    end_hosts()
    found = workflow.get_output("w", task_id="make")
    assert isinstance(found["ref"], ray.ObjectRef)
    assert (ray.get(found["ref"]), found["n"]) == ("kept", 1)


def test_large_values_of_any_kind_come_back_as_they_were() -> None:
    import numpy

    @ray.remote
    def make() -> Any:
        return numpy.arange(300_000), {frozenset({1}): "x"}, Refused("kept")

    numbers, mapping, error = workflow.run(make.bind())
    assert (int(numbers.sum()), mapping) == (300_000 * 299_999 // 2, {frozenset({1}): "x"})
    assert type(error) is Refused


def test_none_is_a_value(marks: Path) -> None:
    assert workflow.run(marked.bind(marks, "a", None), workflow_id="w") is None
    assert workflow.get_output("w") is None
    assert workflow.run(marked.bind(marks, "a", 1), workflow_id="w") is None
    assert executions(marks, "a") == 1


# Names


def test_steps_are_named_by_function_and_numbered_when_that_is_taken() -> None:
    workflow.run(add.bind(add.bind(add.bind(1, 1), 1), 1), workflow_id="w")
    names = ["_flows.add", "_flows.add_1", "_flows.add_2"]
    assert [workflow.get_output("w", task_id=name) for name in names] == [2, 3, 4]
    assert [workflow.get_metadata("w", name)["task_id"] for name in names] == names


def test_a_task_id_names_a_step_and_a_second_one_is_numbered(marks: Path) -> None:
    one = marked.options(**named("x")).bind(marks, "a", 1)
    two = marked.options(**named("x")).bind(marks, "b", 2)
    workflow.run(gather.bind([one, two]), workflow_id="w")
    assert [workflow.get_output("w", task_id=name) for name in ("x", "x_1")] == [1, 2]


def test_a_name_may_hold_any_character() -> None:
    name = "läd/en: ../1 \N{SNOWMAN}"
    workflow.run(add.options(**named(name)).bind(1, 2), workflow_id="w")
    assert workflow.get_output("w", task_id=name) == 3


# Options


def test_options_are_a_decorator() -> None:
    @workflow.options(task_id="decorated", metadata={"k": 1})
    @ray.remote
    def step() -> int:
        return 7

    workflow.run(step.bind(), workflow_id="w")
    assert workflow.get_output("w", task_id="decorated") == 7
    assert workflow.get_metadata("w", "decorated")["user_metadata"] == {"k": 1}


def test_options_of_a_call_win_over_the_decorators_where_both_say_something() -> None:
    @workflow.options(task_id="decorated", metadata={"k": 1}, catch_exceptions=True)
    @ray.remote
    def step() -> int:
        return 7

    dag = step.options(num_cpus=0, **workflow.options(task_id="called")).bind()
    assert workflow.run(dag, workflow_id="w") == (7, None)
    found = workflow.get_metadata("w", "called")
    assert found["user_metadata"] == {"k": 1}
    assert found["task_options"]["catch_exceptions"] is True
    assert found["task_options"]["ray_options"] == {"num_cpus": 0}


def test_options_of_one_remote_function_are_not_those_of_another_of_the_same_body() -> None:
    plain = ray.remote(add._function)
    kept = workflow.options(task_id="told", metadata={"x": 1})(ray.remote(add._function))
    workflow.run(plain.bind(kept.bind(1, 2), 3), workflow_id="w")
    assert workflow.get_metadata("w", "told")["user_metadata"] == {"x": 1}
    assert workflow.get_metadata("w", "_flows.add")["user_metadata"] == {}


def test_options_that_are_not_known_or_not_json_are_refused() -> None:
    with pytest.raises(ValueError, match=r"Invalid option keywords \{'tries'\} for workflow tasks"):
        workflow.options(tries=3)
    with pytest.raises(ValueError, match=r"metadata must be a dict\."):
        workflow.options(metadata="x")
    with pytest.raises(ValueError, match="metadata must be JSON serializable"):
        workflow.options(metadata={"x": {1}})
    with pytest.raises(ValueError, match=r"Only apply 'workflow\.options' to Ray remote functions\."):
        workflow.options(task_id="x")(lambda: 1)


def test_options_of_rays_own_reach_the_task() -> None:
    @ray.remote
    def where() -> tuple[float, str | None]:
        return ray.get_runtime_context().get_assigned_resources()["CPU"], os.environ.get("WF_TEST")

    dag = where.options(num_cpus=2, runtime_env={"env_vars": {"WF_TEST": "here"}}).bind()
    assert workflow.run(dag) == (2.0, "here")


def test_a_caught_error_is_a_value_and_so_is_a_success() -> None:
    @ray.remote
    def divide(a: int, b: int) -> float:
        return a / b

    @ray.remote
    def both(one: tuple[Any, Any], two: tuple[Any, Any]) -> Any:
        return one, two

    catching = divide.options(**workflow.options(catch_exceptions=True))
    good, (nothing, error) = workflow.run(both.bind(catching.bind(1, 2), catching.bind(1, 0)))
    assert (good, nothing, type(error)) == ((0.5, None), None, ZeroDivisionError)


def test_a_lost_process_is_not_caught() -> None:
    @ray.remote(max_retries=0)
    def die() -> None:
        os._exit(1)

    with pytest.raises(workflow.WorkflowExecutionError) as failed:
        workflow.run(die.options(**workflow.options(catch_exceptions=True)).bind())
    assert isinstance(failed.value.__cause__, VerlWorkflowError)
    assert failed.value.__cause__.code is ErrorCode.WORKER_LOST


def test_an_error_in_a_continuation_is_caught_by_the_step_that_led_to_it(marks: Path) -> None:
    @ray.remote
    def outer(folder: Path) -> Any:
        mark(folder, "outer")
        inner = refusing_until.bind(folder, "inner", "never")
        return workflow.continuation(add.bind(inner, 1))

    value, error = workflow.run(outer.options(**workflow.options(catch_exceptions=True)).bind(marks), workflow_id="w")
    assert (value, type(error)) == (None, Refused)
    assert workflow.get_status("w") is workflow.SUCCESSFUL
    assert (executions(marks, "outer"), executions(marks, "inner")) == (1, 1)


def test_a_value_that_is_not_kept_is_used_but_cannot_be_asked_for(marks: Path) -> None:
    skipped = marked.options(**named("skipped", checkpoint=False)).bind(marks, "skipped", 4)
    assert workflow.run(add.bind(skipped, skipped), workflow_id="w") == 8
    assert executions(marks, "skipped") == 1
    with pytest.raises(ValueError, match="Cannot load output from task id 'skipped' in workflow 'w'"):
        workflow.get_output("w", task_id="skipped")


def test_a_value_that_was_not_kept_is_computed_again_after_a_failure(marks: Path) -> None:
    kept = marked.bind(marks, "kept", 1)
    skipped = marked.options(**workflow.options(checkpoint=False)).bind(marks, "skipped", 4, kept)
    last = refusing_until.bind(marks, "last", "mended", skipped)
    with pytest.raises(workflow.WorkflowExecutionError):
        workflow.run(last, workflow_id="w")
    (marks / "mended").touch()
    assert workflow.resume("w") == 4
    assert [executions(marks, name) for name in ("kept", "skipped", "last")] == [1, 2, 2]


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


# The queue


def test_workflows_wait_for_their_turn_and_too_many_are_refused(tmp_path: Path, marks: Path) -> None:
    workflow.init(storage=str(tmp_path / "queue"), max_running_workflows=1, max_pending_workflows=1)
    first = workflow.run_async(waiting.bind(marks, "a", 1), workflow_id="first")
    second = workflow.run_async(marked.bind(marks, "b", 2), workflow_id="second")
    started(marks, "a")
    assert workflow.get_status("second") is workflow.PENDING
    assert workflow.list_all("PENDING") == [("second", workflow.PENDING)]
    with pytest.raises(queue.Full, match="Workflow queue has been full"):
        workflow.run_async(marked.bind(marks, "c", 3), workflow_id="third")
    assert [name for name, _ in workflow.list_all()] == ["first", "second"]
    with pytest.raises(RuntimeError, match="already running or pending"):
        workflow.run(add.bind(1, 1), workflow_id="second")
    with pytest.raises(workflow.WorkflowStillActiveError):
        workflow.delete("second")
    assert executions(marks, "b") == 0
    go(marks)
    assert ray.get([first, second]) == [1, 2]
    assert workflow.run(marked.bind(marks, "c", 3), workflow_id="third") == 3


def test_a_pending_workflow_that_is_cancelled_leaves_the_queue_at_once(tmp_path: Path, marks: Path) -> None:
    workflow.init(storage=str(tmp_path / "queue"), max_running_workflows=1, max_pending_workflows=1)
    first = workflow.run_async(waiting.bind(marks, "a", 1), workflow_id="first")
    second = workflow.run_async(marked.bind(marks, "b", 2), workflow_id="second")
    started(marks, "a")
    before = time.monotonic()
    workflow.cancel("second")
    assert time.monotonic() - before < 5
    assert workflow.get_status("second") is workflow.CANCELED
    third = workflow.run_async(marked.bind(marks, "c", 3), workflow_id="third")
    with pytest.raises(workflow.WorkflowCancellationError):
        ray.get(second)
    go(marks)
    assert ray.get([first, third]) == [1, 3]
    assert executions(marks, "b") == 0


@ray.remote(num_cpus=0)
def fails_once(folder: Path, name: str) -> int:
    if mark(folder, name) == 1:
        raise KeyError(name)
    return 7


def test_a_failed_workflow_that_waits_to_be_taken_up_is_pending(tmp_path: Path, marks: Path) -> None:
    workflow.init(storage=str(tmp_path / "queue"), max_running_workflows=1, max_pending_workflows=1)
    with pytest.raises(workflow.WorkflowExecutionError):
        workflow.run(fails_once.bind(marks, "f"), workflow_id="failed")
    slow = workflow.run_async(waiting.bind(marks, "a", 1), workflow_id="slow")
    started(marks, "a")
    taken_up = workflow.resume_async("failed")
    until(lambda: workflow.get_status("failed") is workflow.PENDING, "queued resume")
    with pytest.raises(RuntimeError, match="already running or pending"):
        workflow.resume("failed")
    workflow.cancel("failed")
    assert workflow.get_status("failed") is workflow.FAILED
    with pytest.raises(workflow.WorkflowExecutionError):
        ray.get(taken_up)

    taken_up = workflow.resume_async("failed")
    until(lambda: workflow.get_status("failed") is workflow.PENDING, "queued resume")
    kill_driver("slow")
    go(marks)
    assert ray.get([slow, taken_up], timeout=120) == [1, 7]
    assert executions(marks, "f") == 2


def test_another_durability_than_the_hosts_is_refused(tmp_path: Path) -> None:
    folder = str(tmp_path / "queue")
    workflow.init(storage=folder, max_running_workflows=2)
    with pytest.raises(ValueError, match="durability='process'"):
        workflow.init(storage=folder, max_running_workflows=2, durability="power")


@ray.remote(num_cpus=0)
def own_status(workflow_id: str) -> str:
    return str(workflow.get_status(workflow_id).value)


def test_inside_of_a_step_the_storage_is_that_of_its_workflow(tmp_path: Path) -> None:
    workflow.init(storage=str(tmp_path / "somewhere"))
    assert workflow.run(own_status.bind("w"), workflow_id="w") == "RUNNING"


def test_init_refuses_limits_that_make_no_sense_or_differ_from_the_hosts(tmp_path: Path) -> None:
    folder = str(tmp_path / "queue")
    for wrong in (0, -2):
        with pytest.raises(ValueError, match="'max_running_workflows' must be a positive integer"):
            workflow.init(storage=folder, max_running_workflows=wrong)
    with pytest.raises(ValueError, match="'max_pending_workflows' must be a non-negative integer"):
        workflow.init(storage=folder, max_pending_workflows=-2)
    with pytest.raises(TypeError, match="'max_running_workflows' must be None or an integer"):
        workflow.init(storage=folder, max_running_workflows="2")  # type: ignore[arg-type]
    workflow.init(storage=folder, max_running_workflows=2, max_pending_workflows=0)
    workflow.init(storage=folder)
    workflow.init(storage=folder, max_running_workflows=2)
    with pytest.raises(ValueError, match="the init options do not match the original ones"):
        workflow.init(storage=folder, max_running_workflows=3)


# Events and sleep


class FileListener(workflow.EventListener):
    """The event is what a file holds."""

    async def poll_for_event(self, folder: Path, name: str) -> str:
        import asyncio

        mark(folder, "polled")
        while not (folder / name).exists():
            await asyncio.sleep(0.02)
        return (folder / name).read_text()

    async def event_checkpointed(self, event: str) -> None:
        folder, storage, _ = event.split("|")
        steps = workflow.read_run(Store(storage), "w").steps
        polled = next(step for name, step in steps.items() if "get_message" in name)
        mark(Path(folder), "told" if polled.value == event else "told too early")


def test_an_event_is_committed_and_then_the_listener_is_told(flows: Path, marks: Path) -> None:
    event = f"{marks}|{flows}|hello"
    ref = workflow.run_async(gather.bind([workflow.wait_for_event(FileListener, marks, "event")]), workflow_id="w")
    started(marks, "polled")
    assert ray.wait([ref], timeout=0.3)[0] == []
    (marks / ".event").write_text(event)
    (marks / ".event").rename(marks / "event")
    assert ray.get(ref) == [event]
    assert (executions(marks, "polled"), executions(marks, "told")) == (1, 1)
    assert executions(marks, "told too early") == 0


def test_an_event_that_was_committed_is_not_polled_again(flows: Path, marks: Path) -> None:
    (marks / "event").write_text(f"{marks}|{flows}|hello")
    event = workflow.wait_for_event(FileListener, marks, "event")
    with pytest.raises(workflow.WorkflowExecutionError):
        workflow.run(refusing_until.bind(marks, "last", "mended", event), workflow_id="w")
    (marks / "mended").touch()
    assert workflow.resume("w") == f"{marks}|{flows}|hello"
    assert (executions(marks, "polled"), executions(marks, "told")) == (1, 1)


def test_a_waiting_event_can_be_cancelled(marks: Path) -> None:
    workflow.run_async(workflow.wait_for_event(FileListener, marks, "never"), workflow_id="w")
    started(marks, "polled")
    workflow.cancel("w")
    assert workflow.get_status("w") is workflow.CANCELED


def test_a_waiting_event_whose_process_is_lost_is_waited_for_again(flows: Path, marks: Path) -> None:
    ref = workflow.run_async(workflow.wait_for_event(FileListener, marks, "event"), workflow_id="w")
    started(marks, "polled")
    (polled,) = marks.glob("polled.*")
    os.kill(int(polled.read_text()), signal.SIGKILL)
    until(lambda: executions(marks, "polled") == 2, "second call")
    (marks / "event").write_text(f"{marks}|{flows}|hello")
    assert ray.get(ref) == f"{marks}|{flows}|hello"


def test_wait_for_event_wants_a_listener_class() -> None:
    for wrong in (int, 5, FileListener()):
        with pytest.raises(TypeError, match=r"is not a subclass of workflow\.EventListener"):
            workflow.wait_for_event(wrong)


def test_sleep_lasts_so_long_and_gives_none() -> None:
    before = time.monotonic()
    assert workflow.run(workflow.sleep(0.7)) is None
    assert time.monotonic() - before >= 0.7


def test_sleep_begins_when_what_it_waits_for_has_ended() -> None:
    @ray.remote
    def seconds() -> float:
        time.sleep(0.5)
        return 0.5

    before = time.monotonic()
    workflow.run(workflow.sleep(seconds.bind()))
    assert time.monotonic() - before >= 1.0


# The attempt, seen from within


def test_current_tells_a_step_of_itself() -> None:
    @ray.remote
    def about() -> tuple[Any, ...]:
        found = workflow.current()
        return found.run_id, found.step, found.attempt, found.last_heartbeat

    assert workflow.run(about.options(**named("me")).bind(), workflow_id="w") == ("w", "me", 1, None)
    with pytest.raises(RuntimeError, match=r"workflow\.current\(\) is for functions that a workflow executes"):
        workflow.current()


def test_the_idempotency_token_is_one_for_all_attempts_and_another_for_each_step(marks: Path) -> None:
    @ray.remote(max_retries=2, retry_exceptions=True)
    def token(folder: Path) -> tuple[str, int]:
        found = workflow.current()
        (folder / f"token.{found.step}.{found.attempt}").write_text(found.idempotency_token)
        if found.attempt < 3:
            raise Refused
        return found.idempotency_token, found.attempt

    one, two = token.options(**named("one")).bind(marks), token.options(**named("two")).bind(marks)
    (first, attempts), (second, _) = workflow.run(gather.bind([one, two]), workflow_id="w")
    assert attempts == 3
    assert {(marks / f"token.one.{n}").read_text() for n in (1, 2, 3)} == {first}
    assert first != second
    assert workflow.run(gather.bind([token.options(**named("one")).bind(marks)]), workflow_id="v")[0][0] != first


def test_an_attempt_finds_what_an_earlier_one_reported_even_when_that_was_killed() -> None:
    @ray.remote(max_retries=1)
    def steps() -> Any:
        found = workflow.current()
        if found.attempt == 1:
            found.heartbeat(done=3)
            time.sleep(0.2)
            os._exit(1)
        return found.last_heartbeat

    assert workflow.run(steps.bind()) == {"done": 3}


# Attempts


def test_errors_are_not_retried_unless_asked_for(marks: Path) -> None:
    with pytest.raises(workflow.WorkflowExecutionError):
        workflow.run(refusing_until.options(max_retries=5).bind(marks, "a", "never"))
    assert executions(marks, "a") == 1


def test_max_retries_bounds_errors_when_they_are_retried(marks: Path) -> None:
    step = refusing_until.options(max_retries=2, retry_exceptions=True, **named("a"))
    with pytest.raises(workflow.WorkflowExecutionError):
        workflow.run(step.bind(marks, "a", "never"), workflow_id="w")
    assert executions(marks, "a") == 3
    assert attempts_of("w", "a") == [(1, "failed"), (2, "failed"), (3, "failed")]


def test_a_policy_retries_the_classes_it_names_and_their_subclasses(marks: Path) -> None:
    @ray.remote
    def raises(folder: Path, name: str, error: BaseException) -> int:
        if mark(folder, name) < 3:
            raise error
        return 1

    policy = workflow.RetryPolicy(attempts=3, backoff_s=0.0, on=(Refused,), never=(AlsoRefused,))
    step = raises.options(**workflow.options(retry=policy))
    assert workflow.run(step.bind(marks, "on", Refused())) == 1
    for name, error in (("never", AlsoRefused()), ("other", KeyError("k"))):
        with pytest.raises(workflow.WorkflowExecutionError) as failed:
            workflow.run(step.bind(marks, name, error))
        assert type(failed.value.__cause__) is type(error)
        assert executions(marks, name) == 1


def test_a_policy_pauses_longer_each_time(marks: Path) -> None:
    policy = workflow.RetryPolicy(attempts=3, backoff_s=0.4, factor=2.0)
    step = refusing_until.options(**named("a", retry=policy))
    with pytest.raises(workflow.WorkflowExecutionError):
        workflow.run(step.bind(marks, "a", "never"), workflow_id="w")
    first, second, third = workflow.get_metadata("w", "a")["attempts"]
    assert second["start_time"] - first["end_time"] >= 0.39
    assert third["start_time"] - second["end_time"] >= 0.79


def test_lost_processes_have_a_budget_apart_from_that_of_errors(marks: Path) -> None:
    @ray.remote
    def unlucky(folder: Path) -> int:
        count = mark(folder, "a")
        if count in (1, 3):
            os._exit(1)
        if count in (2, 4):
            raise Refused
        return count

    policy = workflow.RetryPolicy(attempts=3, crashes=2, backoff_s=0.0)
    assert workflow.run(unlucky.options(**workflow.options(retry=policy)).bind(marks)) == 5


def test_the_budget_of_lost_processes_ends(marks: Path) -> None:
    @ray.remote
    def dies(folder: Path) -> None:
        mark(folder, "a")
        os._exit(1)

    policy = workflow.RetryPolicy(attempts=5, crashes=1, backoff_s=0.0)
    with pytest.raises(workflow.WorkflowExecutionError) as failed:
        workflow.run(dies.options(**workflow.options(retry=policy)).bind(marks))
    assert isinstance(failed.value.__cause__, VerlWorkflowError)
    assert failed.value.__cause__.code is ErrorCode.WORKER_LOST
    assert executions(marks, "a") == 2


def test_an_attempt_that_takes_too_long_is_stopped_and_tried_again(marks: Path) -> None:
    @ray.remote
    def slow_first(folder: Path) -> int:
        if mark(folder, "a") == 1:
            time.sleep(60)
        return workflow.current().attempt

    policy = workflow.RetryPolicy(attempts=2, backoff_s=0.0)
    before = time.monotonic()
    step = slow_first.options(**named("a", timeout_s=1.0, retry=policy))
    assert workflow.run(step.bind(marks), workflow_id="w") == 2
    assert time.monotonic() - before < 30
    first, _ = workflow.get_metadata("w", "a")["attempts"]
    assert "took longer than 1 s" in first["error"]


def test_the_time_of_an_attempt_does_not_run_while_it_waits_for_a_cpu(marks: Path) -> None:
    busy = waiting.options(num_cpus=4).remote(marks, "busy")
    started(marks, "busy")
    quick = marked.options(num_cpus=4, **named("quick", timeout_s=1.5)).bind(marks, "quick", 0)
    ref = workflow.run_async(quick, workflow_id="w")
    until(lambda: workflow.get_status("w") is workflow.RUNNING, "driver")
    time.sleep(2.5)
    assert executions(marks, "quick") == 0
    go(marks)
    assert ray.get([busy, ref]) == [None, 0]
    assert attempts_of("w", "quick") == [(1, "succeeded")]


def test_an_attempt_without_signs_of_life_is_stopped_and_one_with_them_is_not(marks: Path) -> None:
    @ray.remote
    def beats(folder: Path, silent: bool) -> int:
        found = workflow.current()
        if silent and found.attempt == 1:
            time.sleep(60)
        for n in range(5):
            found.heartbeat(n=n)
            time.sleep(0.7)
        return found.attempt

    policy = workflow.RetryPolicy(attempts=2, backoff_s=0.0)
    step = beats.options(**named("a", heartbeat_timeout_s=2.5, retry=policy))
    assert workflow.run(
        gather.options(num_cpus=0).bind([step.bind(marks, False), step.bind(marks, True)]), workflow_id="w"
    ) == [1, 2]
    assert "no sign of life for 2.5 s" in workflow.get_metadata("w", "a_1")["attempts"][0]["error"]


def test_reading_needs_no_cluster_and_writes_nothing(flows: Path) -> None:
    workflow.run(add.options(**named("a")).bind(1, 2), workflow_id="w")
    end_hosts()
    before = {path: path.stat().st_mtime_ns for path in flows.rglob("*")}
    assert (workflow.get_output("w"), workflow.get_output("w", task_id="a")) == (3, 3)
    assert (workflow.get_status("w"), workflow.list_all()) == (workflow.SUCCESSFUL, [("w", workflow.SUCCESSFUL)])
    assert workflow.get_metadata("w")["status"] == "SUCCESSFUL"
    assert {path: path.stat().st_mtime_ns for path in flows.rglob("*")} == before
    assert store().list("hosts") != []
