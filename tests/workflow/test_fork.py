"""Forks: what does not depend on the step is taken over, what does is executed, and the first workflow is let be."""

from __future__ import annotations

import importlib
import linecache
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from _workflows import drive_workflow, record

from verl_workflow import workflow
from verl_workflow.errors import ErrorCode, UserError, VerlWorkflowError
from verl_workflow.storage import Store
from verl_workflow.workflow import RunState, RunStatus, create_run, list_runs, read_run
from verl_workflow.workflow._definition import run_key
from verl_workflow.workflow._fork import check_fork, copy_workflow, taken_steps
from verl_workflow.workflow._gc import collect
from verl_workflow.workflow._graph import StepNode
from verl_workflow.workflow._guard import changed_steps
from verl_workflow.workflow._names import RunKey
from verl_workflow.workflow._node import load_function
from verl_workflow.workflow._options import StepOptions

BIG = 5000


def node(function: Callable[..., Any], *args: Any, name: str, **options: Any) -> StepNode:
    return StepNode(function, args, {}, StepOptions(task_id=name, **options))


class Marks:
    """Files that say how often each step was executed."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def step(self, name: str, *args: Any, then: Callable[..., Any] | None = None, **options: Any) -> StepNode:
        folder = self.folder

        def execute(*values: Any) -> Any:
            with (folder / name).open("a") as file:
                file.write(".")
            return then(*values) if then is not None else "+".join([name, *map(str, values)])

        return node(execute, *args, name=name, **options)

    def counts(self) -> dict[str, int]:
        return {path.name: len(path.read_text()) for path in self.folder.iterdir()}


@pytest.fixture
def done(marks: Path) -> Marks:
    return Marks(marks)


def fork(store: Store, workflow_id: str, step: str, new_id: str) -> RunState:
    """`workflow.fork`, without a host."""
    state = read_run(store, workflow_id)
    check_fork(store, state, step, new_id)
    key = RunKey.new(new_id)
    forked = copy_workflow(store, state, step, key)
    create_run(store, new_id, forked.definition, incarnation=key.incarnation, seed=forked.seed)
    return drive_workflow(store, new_id)


def output(store: Store, workflow_id: str, task_id: str | None = None) -> Any:
    workflow.init(storage=store.uri)
    return workflow.get_output(workflow_id, task_id=task_id)


def diamond(done: Marks) -> StepNode:
    """a -> (b, c) -> d, and e that only d needs."""
    a = done.step("a", then=lambda: "a" * BIG)
    b, c = done.step("b", a, then=lambda found: len(found)), done.step("c", a, then=lambda found: found[:2])
    return done.step("d", b, c, done.step("e"))


@pytest.mark.parametrize(
    ("step", "again"),
    [("a", "abcd"), ("b", "bd"), ("c", "cd"), ("d", "d"), ("e", "de")],
)
def test_the_step_and_what_depends_on_it_run_again(store: Store, done: Marks, step: str, again: str) -> None:
    record(store, "w", diamond(done), owner="me")
    drive_workflow(store, "w")
    before = {key: store.get(key) for key in store.list("runs/w")}
    state = fork(store, "w", step, "new/one")
    assert state.status is RunStatus.SUCCEEDED, state.error
    assert done.counts() == {name: 2 if name in again else 1 for name in "abcde"}
    assert {name for name, each in state.steps.items() if each.reused_from == "w"} == set("abcde") - set(again)
    assert {key: store.get(key) for key in store.list("runs/w")} == before
    assert output(store, "new/one") == output(store, "w") == f"d+{BIG}+aa+e"
    assert workflow.get_metadata("new/one")["user_metadata"] == {"owner": "me"}
    assert workflow.get_metadata("new/one", "d")["workflow_refs"] == ["b", "c", "e"]
    assert read_run(store, "new/one").definition["workflow"]["forked_from"] == {"workflow_id": "w", "step": step}


def test_a_fork_outlives_the_first_workflow_and_gc(store: Store, done: Marks) -> None:
    record(store, "w", diamond(done))
    drive_workflow(store, "w")
    fork(store, "w", "d", "new")
    workflow.init(storage=store.uri)
    workflow.delete("w")
    collect(store, "new", stale_after_s=0)
    assert output(store, "new", "a") == "a" * BIG
    # And may be forked itself.
    assert fork(store, "new", "b", "newer").status is RunStatus.SUCCEEDED
    workflow.delete("new")
    assert output(store, "newer") == f"d+{BIG}+aa+e"
    assert done.counts() == {"a": 1, "b": 2, "c": 1, "d": 3, "e": 1}


def test_a_failed_workflow_is_forked_before_its_failure(store: Store, done: Marks, tmp_path: Path) -> None:
    mended = tmp_path / "mended"

    def fragile(found: str) -> str:
        if not mended.exists():
            raise RuntimeError("not mended yet")
        return f"{found}, mended"

    record(store, "w", done.step("b", done.step("a"), then=fragile))
    assert drive_workflow(store, "w").status is RunStatus.FAILED
    mended.touch()
    assert fork(store, "w", "b", "new").status is RunStatus.SUCCEEDED
    assert done.counts() == {"a": 1, "b": 2}
    assert read_run(store, "w").status is RunStatus.FAILED
    assert output(store, "new") == "a, mended"


def continued(done: Marks) -> StepNode:
    """outer continues to inner_b(inner_a); after needs outer; beside needs nothing of them."""
    outer = done.step("outer", then=lambda: done.step("inner_b", done.step("inner_a")))
    return done.step("last", done.step("after", outer), done.step("beside"))


@pytest.mark.parametrize(
    ("step", "again"),
    [
        ("outer", {"outer", "inner_a", "inner_b", "after", "last"}),
        ("inner_a", {"inner_a", "inner_b", "after", "last"}),
        ("inner_b", {"inner_b", "after", "last"}),
        ("after", {"after", "last"}),
        ("beside", {"beside", "last"}),
    ],
)
def test_dependents_are_found_through_continuations(store: Store, done: Marks, step: str, again: set[str]) -> None:
    record(store, "w", continued(done))
    drive_workflow(store, "w")
    names = set(done.counts())
    state = fork(store, "w", step, "new")
    assert state.status is RunStatus.SUCCEEDED, state.error
    assert done.counts() == {name: 2 if name in again else 1 for name in names}
    # No step has got a second name beside the one it had.
    assert set(state.steps) == names
    workflow.init(storage=store.uri)
    workflow.delete("w")
    assert output(store, "new") == "last+after+inner_b+inner_a+beside"


def test_a_caught_error_is_taken_over(store: Store, done: Marks) -> None:
    def fails() -> Any:
        raise KeyError("caught")

    outer = done.step("outer", then=lambda: done.step("inner", then=fails), catch_exceptions=True)
    record(store, "w", done.step("last", outer, then=lambda found: type(found[1]).__name__))
    drive_workflow(store, "w")
    assert fork(store, "w", "last", "new").status is RunStatus.SUCCEEDED
    assert output(store, "new") == "KeyError"
    assert done.counts() == {"outer": 1, "inner": 1, "last": 2}


@pytest.mark.parametrize("step", ["inner", "beside"])
def test_a_step_whose_error_was_caught_takes_along_the_one_that_has_caught_it(
    store: Store, done: Marks, tmp_path: Path, step: str
) -> None:
    def fragile() -> str:
        if not (tmp_path / "mended").exists():
            raise KeyError("not mended yet")
        return "inner"

    def middle() -> StepNode:
        return done.step("both", done.step("inner", then=fragile), done.step("beside"))

    outer = done.step("outer", then=lambda: done.step("middle", then=middle), catch_exceptions=True)
    record(store, "w", done.step("last", outer, then=lambda found: found[0]))
    drive_workflow(store, "w")
    assert output(store, "w") is None
    (tmp_path / "mended").touch()
    assert fork(store, "w", step, "new").status is RunStatus.SUCCEEDED
    assert output(store, "new") == "both+inner+beside"


def test_values_that_were_not_kept_are_computed_again(store: Store, done: Marks) -> None:
    first = done.step("first", checkpoint=False)
    record(store, "w", done.step("last", done.step("middle", first), first))
    drive_workflow(store, "w")
    assert fork(store, "w", "last", "new").status is RunStatus.SUCCEEDED
    assert done.counts() == {"first": 2, "middle": 1, "last": 2}


def test_what_cannot_be_forked_is_refused_and_nothing_is_written(store: Store, done: Marks) -> None:
    record(store, "w", diamond(done))
    record(store, "other", diamond(done))
    create_run(store, "p", {"pipeline": {"name": "demo", "stages": []}})
    before = store.list("")
    workflow.init(storage=store.uri)
    for arguments, code in (
        (("nope", "a", "new"), ErrorCode.RUN_UNKNOWN),
        (("w", "a", "other"), ErrorCode.RUN_EXISTS),
        (("w", "a", ".."), ErrorCode.RUN_ID_INVALID),
        (("p", "a", "new"), ErrorCode.USAGE_INVALID),
    ):
        with pytest.raises(VerlWorkflowError) as caught:
            workflow.fork(*arguments[:2], new_workflow_id=arguments[2])
        assert caught.value.code is code
    with pytest.raises(ValueError, match="No such task_id 'nope' in workflow 'w'"):
        workflow.fork("w", "nope")
    assert store.list("") == before


def test_a_damaged_value_keeps_the_fork_from_being_recorded(store: Store, done: Marks) -> None:
    record(store, "w", diamond(done))
    drive_workflow(store, "w")
    (value,) = store.list(f"{run_key(store, 'w').folder}/values")
    store.put(value, b"torn")
    with pytest.raises(VerlWorkflowError) as caught:
        fork(store, "w", "d", "new")
    assert caught.value.code is ErrorCode.JOURNAL_DAMAGED
    assert [state.run_id for state in list_runs(store)] == ["w"]
    # What is not taken over is of no matter.
    assert fork(store, "w", "a", "new").status is RunStatus.SUCCEEDED


def test_an_unfinished_workflow_gives_what_it_has(store: Store, done: Marks) -> None:
    record(store, "w", diamond(done))
    assert taken_steps(read_run(store, "w"), "b", store) == set("ace")
    assert fork(store, "w", "b", "new").status is RunStatus.SUCCEEDED
    assert done.counts() == dict.fromkeys("abcde", 1)


@pytest.mark.timeout(300)
def test_a_fork_on_ray_takes_object_references_along(store: Store, ray_cluster: Any, tmp_path: Path) -> None:
    import ray

    log = tmp_path / "log"

    @workflow.options(task_id="first")
    @ray.remote
    def first(given: list[Any]) -> dict[str, Any]:
        log.open("a").write("first\n")
        return {"deep": [ray.put({"inner": ray.put("x" * BIG)}), given[0]], "pad": b"p" * BIG}

    @workflow.options(task_id="last")
    @ray.remote
    def last(found: dict[str, Any]) -> Any:
        log.open("a").write("last\n")
        deep, given = ray.get(found["deep"])
        return len(ray.get(deep["inner"])), given

    workflow.init(storage=store.uri)
    assert workflow.run(last.bind(first.bind([ray.put("given")])), workflow_id="w") == (BIG, "given")
    new_id, found = workflow.fork("w", "last")
    assert tuple(found) == (BIG, "given")
    other, reference = workflow.fork_async("w", "first", new_workflow_id="a/fork of it")
    assert other == "a/fork of it"
    assert tuple(ray.get(reference, timeout=120)) == (BIG, "given")
    with pytest.raises(UserError, match="exists already"):
        workflow.fork("w", "last", new_workflow_id=other)
    workflow.delete("w")
    third, found = workflow.fork(new_id, "last")
    assert tuple(found) == (BIG, "given")
    workflow.delete(new_id)
    deep = ray.get(workflow.get_output(third, task_id="first")["deep"])
    assert ray.get(deep[0]["inner"]) == "x" * BIG
    assert log.read_text().split() == ["first", "last", "last", "first", "last", "last"]


MODULE = "def first():\n    return 1\n\n\ndef second(number):\n    return number + 1\n"


@pytest.fixture
def unclaimed(store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A fork whose host was lost before it took it; the code of the step that it takes over has changed since."""
    name = f"forked_{tmp_path.name}"
    file = tmp_path / f"{name}.py"
    file.write_text(MODULE)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    module = importlib.import_module(name)
    record(store, "w", node(module.second, node(module.first, name="first"), name="second"))
    assert drive_workflow(store, "w").status is RunStatus.SUCCEEDED
    key = RunKey.new("new")
    forked = copy_workflow(store, read_run(store, "w"), "second", key)
    create_run(store, "new", forked.definition, incarnation=key.incarnation, seed=forked.seed)
    file.write_text(MODULE.replace("return 1", "return 100"))
    linecache.clearcache()
    load_function.cache_clear()
    del sys.modules[name]
    importlib.invalidate_caches()
    return "new"


def test_a_fork_that_nobody_has_driven_knows_what_it_takes_over(store: Store, unclaimed: str) -> None:
    state = read_run(store, unclaimed)
    assert (state.steps["first"].value, state.steps["first"].reused_from) == (1, "w")
    with pytest.raises(UserError, match="first") as caught:
        changed_steps(state, store, "fail")
    assert caught.value.code is ErrorCode.DEFINITION_CHANGED
    assert output(store, unclaimed, "first") == 1


def test_its_changed_steps_are_executed_again_if_that_is_asked_for(store: Store, unclaimed: str) -> None:
    reset = changed_steps(read_run(store, unclaimed), store, "rerun")
    assert reset is not None
    assert set(reset.steps) == {"first"}
    drive_workflow(store, unclaimed, reset=reset)
    assert output(store, unclaimed) == 101
    assert changed_steps(read_run(store, unclaimed), store, "fail") is None


def test_and_kept_otherwise(store: Store, unclaimed: str) -> None:
    drive_workflow(store, unclaimed)
    assert output(store, unclaimed) == 2
