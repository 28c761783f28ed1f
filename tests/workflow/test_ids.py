"""What cannot be the id of a workflow is refused as such by all that take one, and nothing is written for it."""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from _graphs import node, record, run_graph

from verl_workflow import workflow
from verl_workflow.errors import ErrorCode, UserError
from verl_workflow.storage import Store
from verl_workflow.workflow import _session
from verl_workflow.workflow._client import Client


def seven() -> int:
    return 7


# Each is given an id; there is a workflow "w" with a step "seven".
TAKERS: dict[str, Callable[[Any], Any]] = {
    "run": lambda workflow_id: workflow.run(node(seven), workflow_id=workflow_id),
    "run_async": lambda workflow_id: workflow.run_async(node(seven), workflow_id=workflow_id),
    "resume": workflow.resume,
    "resume_async": workflow.resume_async,
    "fork": lambda workflow_id: workflow.fork(workflow_id, "seven"),
    "fork_async": lambda workflow_id: workflow.fork_async(workflow_id, "seven"),
    "fork to": lambda workflow_id: workflow.fork("w", "seven", new_workflow_id=workflow_id),
    "fork_async to": lambda workflow_id: workflow.fork_async("w", "seven", new_workflow_id=workflow_id),
    "get_output": workflow.get_output,
    "get_output of a step": lambda workflow_id: workflow.get_output(workflow_id, task_id="seven"),
    "get_output_async": workflow.get_output_async,
    "get_status": workflow.get_status,
    "get_metadata": workflow.get_metadata,
    "get_metadata of a step": lambda workflow_id: workflow.get_metadata(workflow_id, "seven"),
    "cancel": workflow.cancel,
    "send_event": lambda workflow_id: workflow.send_event(workflow_id, "key"),
    "delete": workflow.delete,
    "gc": workflow.gc,
}

IDS = {
    "": "it is empty",
    ".": "it means a folder",
    "..": "it means a folder",
    "x" * 201: "it has 201 characters, more than 200",
    "x" * 300: "it has 300 characters, more than 200",
    "a\0b": "it holds a NUL",
    "\ud800": "half of a surrogate pair",
}


@pytest.fixture
def kept(store: Store, monkeypatch: pytest.MonkeyPatch) -> Iterator[Store]:
    run_graph(store, "w", record(store, "w", node(seven)))
    monkeypatch.setattr(_session, "_PRESENT", Client(store))
    yield store


@pytest.mark.parametrize("take", TAKERS.values(), ids=TAKERS)
def test_what_cannot_be_an_id_is_refused_with_the_reason(kept: Store, take: Callable[[Any], Any]) -> None:
    before = kept.list("")
    for workflow_id, reason in IDS.items():
        with pytest.raises(UserError, match=reason) as refused:
            take(workflow_id)
        assert refused.value.code is ErrorCode.RUN_ID_INVALID
        assert refused.value.value == workflow_id
        assert "Use 1 to 200 characters" in refused.value.remedy
    for wrong in (5, b"w", ["w"]):
        with pytest.raises(TypeError, match="has to be a string type"):
            take(wrong)
    assert kept.list("") == before
    assert workflow.list_all() == [("w", workflow.SUCCESSFUL)]


class Names(str, enum.Enum):
    """Texts that Python writes out by other names than their own."""

    NIGHTLY = "nightly"
    SEVEN = "the seven"


def test_an_id_that_is_an_enums_member_is_the_text_that_it_equals(kept: Store) -> None:
    graph = record(
        kept, Names.NIGHTLY, node(seven, **workflow_options(task_id=Names.SEVEN, metadata={"s": Names.SEVEN}))
    )
    run_graph(kept, Names.NIGHTLY, graph)
    assert workflow.list_all() == [("nightly", workflow.SUCCESSFUL), ("w", workflow.SUCCESSFUL)]
    for name in ("nightly", Names.NIGHTLY):
        assert workflow.get_output(name, task_id="the seven") == 7
        assert workflow.get_metadata(name, Names.SEVEN)["user_metadata"] == {"s": "the seven"}
    assert kept.folders("runs") == ["nightly", "w"]
    # Whoever loads it does not have the user's classes.
    assert b"Names" not in graph.to_bytes()


def workflow_options(**given: Any) -> dict[str, Any]:
    """What `workflow.options` makes of them."""
    return dict(workflow.options(**given)._options)


@pytest.mark.parametrize("wrong", [{"loss": float("nan")}, {"loss": float("inf")}, {"a": object()}, ["a"]])
def test_metadata_that_json_cannot_hold_is_refused_where_it_is_written(kept: Store, wrong: Any) -> None:
    before = kept.list("")
    with pytest.raises(ValueError, match="metadata must be"):
        workflow.options(metadata=wrong)
    with pytest.raises(ValueError, match="metadata must be"):
        workflow.run(node(seven), workflow_id="x", metadata=wrong)
    assert kept.list("") == before
