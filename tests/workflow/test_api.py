"""The functions that users of ray.workflow know, on a real cluster: what may be run, and what comes of it."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import ray
from _flows import (
    AlsoRefused,
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
    waiting,
)
from ray.dag import InputNode, MultiOutputNode

from verl_workflow import workflow
from verl_workflow.errors import ErrorCode, UserError, VerlWorkflowError

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


def test_an_object_that_many_steps_use_is_fetched_once(monkeypatch: pytest.MonkeyPatch) -> None:
    ref, fetched, get = ray.put(1), [], ray.get
    monkeypatch.setattr(ray, "get", lambda of, **options: [fetched.append(of), get(of, **options)][1])
    assert workflow.run(gather.bind([add.bind(ref, n) for n in range(5)])) == [1, 2, 3, 4, 5]
    assert fetched.count(ref) == 1


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
