"""Graphs whose functions have been mended since, driven in one process."""

from __future__ import annotations

import importlib
import json
import os
import sys
import uuid
from collections.abc import Callable
from operator import attrgetter
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import ray
from _graphs import node, output, record, run_graph

from verl_workflow.storage import Store
from verl_workflow.workflow import RunStatus, create_run, options, read_run
from verl_workflow.workflow._definition import run_key
from verl_workflow.workflow._fork import copy_workflow
from verl_workflow.workflow._functions import Named, at_rest, fingerprint
from verl_workflow.workflow._gc import collect
from verl_workflow.workflow._guard import changed_steps
from verl_workflow.workflow._names import RunKey
from verl_workflow.workflow._node import load_function
from verl_workflow.workflow._state import read_graph

Write = Callable[[str], ModuleType]


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Write:
    """Writes the user's module anew, and gives it as a process has it that starts then."""
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    # Another name for each test: Ray remembers functions by theirs.
    name = f"module_{uuid.uuid4().hex}"

    def write(text: str) -> ModuleType:
        (tmp_path / f"{name}.py").write_text(text)
        sys.modules.pop(name, None)
        importlib.invalidate_caches()
        load_function.cache_clear()
        return importlib.import_module(name)

    return write


def shown(value: Any) -> str:
    return repr(value)


MODULE = """
import ray

@ray.remote
def step():
    {body}
"""


def test_code_of_a_module_that_was_mended_is_what_a_resumed_workflow_runs(store: Store, write: Write) -> None:
    from verl_workflow.workflow._dag import DagView

    module = write(MODULE.format(body="raise ValueError('the bug')"))
    graph = record(store, "r", DagView()(module.step.bind()))  # type: ignore[arg-type]
    assert run_graph(store, "r", graph).status is RunStatus.FAILED
    write(MODULE.format(body="return 'mended'"))
    workflow = read_run(store, "r").definition["workflow"]
    assert run_graph(store, "r", read_graph(store, workflow["graph"], workflow["sha256"])).status is RunStatus.SUCCEEDED
    assert output(store, "r") == "mended"


CATCHING = """
from _graphs import node

def beside():
    return 1

def fragile():
    raise KeyError('the bug')

def add(*numbers):
    return sum(numbers)

def middle():
    return node(add, node(beside), node(fragile))

def outer():
    return node(add, node(middle))

def last(pair):
    raise ValueError
"""


STEPWISE = """
from _graphs import node

def a():
    return 1

def b(a):
    raise ValueError("the bug")

def c(b):
    raise ValueError("another bug")
"""


def test_code_that_was_mended_before_a_step_ran_is_no_change_afterwards(store: Store, write: Write) -> None:
    module = write(STEPWISE)
    graph = record(store, "r", node(module.c, node(module.b, node(module.a, task_id="a"), task_id="b"), task_id="c"))
    assert run_graph(store, "r", graph).status is RunStatus.FAILED
    mended = STEPWISE.replace('raise ValueError("the bug")', "return a + 1")
    write(mended)
    found = changed_steps(read_run(store, "r"), store, "fail")
    assert run_graph(store, "r", graph, reset=found).status is RunStatus.FAILED
    assert read_run(store, "r").steps["b"].value == 2
    assert changed_steps(read_run(store, "r"), store, "fail") is None

    # Nor for a fork of it, nor when a snapshot stands for the journal.
    key = RunKey.new("fork")
    forked = copy_workflow(store, read_run(store, "r"), "c", key)
    create_run(store, "fork", forked.definition, incarnation=key.incarnation, seed=forked.seed)
    assert run_graph(store, "fork", graph).status is RunStatus.FAILED
    assert changed_steps(read_run(store, "fork"), store, "fail") is None
    collect(store, "r", stale_after_s=0)
    assert changed_steps(read_run(store, "r"), store, "fail") is None

    write(mended.replace("return a + 1", "return a + 2"))
    again = changed_steps(read_run(store, "r"), store, "rerun")
    assert again is not None and again.steps == ["b"]
    kinds = [[event["kind"] for event in json.loads(store.get(key) or b"")["events"]] for key in journal_keys(store)]
    assert run_graph(store, "r", graph, reset=again).steps["b"].value == 3
    added = [[event["kind"] for event in json.loads(store.get(key) or b"")["events"]] for key in journal_keys(store)]
    # Whoever has the run has it with what is to be executed again.
    assert added[len(kinds)] == ["claimed", "steps_reset"]


def journal_keys(store: Store) -> list[str]:
    return store.list(f"{run_key(store, 'r').folder}/journal")


def test_options_on_a_remote_function_leave_its_body_one_of_its_module() -> None:
    with_options = options(task_id="x")(ray.remote(shown))
    assert isinstance(at_rest(with_options._function), Named)
    assert fingerprint(with_options._function) == fingerprint(shown) != ""
    assert at_rest(with_options._function).load() is shown


LINES = """class Kept:
    def shown(self):
        return self.__x


def one(x: "int | None") -> int:
    return [each for each in range(x)]


def two(x):
    return 2
"""


def test_a_comment_above_does_not_make_a_function_another_one(write: Write) -> None:
    module = write(LINES)
    assert module.__file__ is not None
    file = Path(module.__file__)
    before = {name: fingerprint(attrgetter(name)(module)) for name in ("one", "two", "Kept.shown")}
    assert "" not in before.values()
    # In the process that has imported it the functions still know their former lines.
    file.write_text("# a comment\n\n\n\n" + LINES)
    os.utime(file, (1, 1))
    assert {name: fingerprint(getattr(module, name)) for name in ("one", "two")} == {
        name: before[name] for name in ("one", "two")
    }
    anew = write(file.read_text())
    assert {name: fingerprint(attrgetter(name)(anew)) for name in before} == before


@pytest.mark.parametrize(
    ("was", "becomes", "value"),
    [("return 1", "return 2", "(None, KeyError('the bug'))"), ("raise KeyError('the bug')", "return 10", "(11, None)")],
)
def test_a_caught_error_is_not_kept_when_the_code_that_led_to_it_has_changed(
    store: Store, write: Write, was: str, becomes: str, value: str
) -> None:
    module = write(CATCHING)
    graph = record(store, "r", node(module.last, node(module.outer, catch_exceptions=True)))
    for _ in range(2):
        assert run_graph(store, "r", graph).status is RunStatus.FAILED
    mended = CATCHING.replace("raise ValueError", "return repr(pair)")
    write(mended)
    # What ended the workflow has no value that could be kept.
    found = changed_steps(read_run(store, "r"), store, "rerun")
    assert found is not None and found.steps == []
    write(mended.replace(was, becomes))
    again = changed_steps(read_run(store, "r"), store, "rerun")
    assert again is not None
    assert "outer" in again.steps
    assert run_graph(store, "r", graph, reset=again).status is RunStatus.SUCCEEDED
    assert output(store, "r") == value


def test_functions_that_travel_with_a_workflow_have_not_changed(store: Store) -> None:
    graph = record(store, "r", node(shown, node(lambda: 1)))
    run_graph(store, "r", graph)
    assert changed_steps(read_run(store, "r"), store, "fail") is None
