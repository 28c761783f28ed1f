"""Graphs that are executed outside of any workflow, as continuations of functions that Ray calls itself."""

from __future__ import annotations

import collections
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import ray
from _flows import add, executions, mark
from ray.dag import InputNode

from verl_workflow import workflow

pytestmark = pytest.mark.usefixtures("flows")


class Counted(workflow.EventListener):
    """An event that is there at once; says when it is asked for and when it is told of."""

    async def poll_for_event(self, marks: Path, number: int) -> tuple[Path, int]:
        mark(marks, "polled")
        return marks, number

    async def event_checkpointed(self, event: tuple[Path, int]) -> None:
        mark(event[0], "told")


@ray.remote
def number_of(event: tuple[Path, int]) -> int:
    return event[1]


@ray.remote
def goes_on_without_input(named: bool) -> Any:
    with InputNode() as given:
        return workflow.continuation(add.bind(given.number if named else given, 1))


def test_a_continuation_waits_for_sleep_and_events_outside_of_a_workflow_too(marks: Path) -> None:
    assert workflow.continuation(workflow.sleep(0.1)) is None
    event = workflow.wait_for_event(Counted, marks, add.bind(1, 2))
    assert workflow.continuation(add.bind(number_of.bind(event), 4)) == 7
    assert (executions(marks, "polled"), executions(marks, "told")) == (1, 1)
    assert workflow.list_all() == []


def test_an_error_of_what_a_continuation_waits_for_is_raised_as_itself() -> None:
    with pytest.raises(RuntimeError, match=r"workflow\.current\(\) is for functions that a workflow executes"):
        workflow.continuation(workflow.wait_for_event(workflow.StorageListener, "key"))


@pytest.mark.parametrize("named", [False, True])
def test_a_continuation_has_no_input_and_says_so(named: bool) -> None:
    with pytest.raises(TypeError, match="This graph has no input"):
        ray.get(goes_on_without_input.remote(named))
    with pytest.raises(workflow.WorkflowExecutionError) as failed:
        workflow.run(goes_on_without_input.bind(named))
    assert isinstance(failed.value.__cause__, TypeError)
    assert "This graph has no input" in str(failed.value.__cause__)


class Point(NamedTuple):
    x: Any
    y: Any


@ray.remote
def kind_and_value(thing: Any) -> tuple[str, Any]:
    return type(thing).__name__, thing


def test_arguments_of_classes_like_tuple_and_dict_arrive_as_they_are() -> None:
    assert workflow.continuation(kind_and_value.bind(Point(1, 2))) == ("Point", Point(1, 2))
    found = workflow.continuation(kind_and_value.bind(collections.defaultdict(list, a=[1])))
    assert found == ("defaultdict", {"a": [1]})
    kind, point = workflow.continuation(kind_and_value.bind(Point(add.bind(1, 2), 4)))
    assert (kind, ray.get(point.x), point.y) == ("Point", 3, 4)
