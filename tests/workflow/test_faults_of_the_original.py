"""What ray.workflow 2.47 got wrong, each seen to be right here, on a real cluster."""

from __future__ import annotations

import itertools
import os
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
    steps_of,
    store,
    until,
    waiting,
)

from verl_workflow import workflow
from verl_workflow.errors import ErrorCode, UserError, VerlWorkflowError
from verl_workflow.storage import Store
from verl_workflow.workflow._state import read_graph

pytestmark = pytest.mark.usefixtures("flows")


def fail(dag: Any, workflow_id: str) -> None:
    with pytest.raises(workflow.WorkflowExecutionError):
        workflow.run(dag, workflow_id=workflow_id)


def test_a_caught_error_is_committed_and_its_step_not_executed_again(marks: Path) -> None:
    """Fault 1."""
    caught = refusing_until.options(**named("caught", catch_exceptions=True)).bind(marks, "caught", "never")
    fail(refusing_until.bind(marks, "last", "mended", caught), "w")
    assert type(workflow.get_output("w", task_id="caught")[1]) is Refused
    (marks / "mended").touch()
    value, error = workflow.resume("w")
    assert (value, type(error), str(error)) == (None, Refused, "no never")
    assert (executions(marks, "caught"), executions(marks, "last")) == (1, 2)


def test_a_step_beside_one_that_fails_is_awaited_committed_and_not_executed_again(marks: Path) -> None:
    """Fault 2."""

    @ray.remote
    def slow(folder: Path) -> int:
        mark(folder, "slow")
        time.sleep(1.5)
        return 5

    @ray.remote
    def fails_first(folder: Path) -> int:
        started(folder, "slow")
        if mark(folder, "bad") == 1:
            raise Refused
        return 6

    fail(add.bind(slow.options(**named("slow")).bind(marks), fails_first.bind(marks)), "w")
    assert workflow.get_output("w", task_id="slow") == 5
    assert workflow.resume("w") == 11
    assert (executions(marks, "slow"), executions(marks, "bad")) == (1, 2)


def test_nothing_is_recorded_before_all_that_arguments_refer_to_is_stored(
    marks: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fault 3."""

    @ray.remote
    def broken() -> None:
        raise Refused("no value")

    with pytest.raises(Refused):
        workflow.run(gather.bind([ray.put(1), broken.remote()]), workflow_id="w")
    assert workflow.list_all() == []

    written: list[str] = []
    create = Store.create

    def recorded(self: Store, key: str, data: bytes) -> bool:
        # What is written by other processes is not seen here: none of it may be needed.
        if key.startswith("runs/"):
            written.append(key)
        return create(self, key, data)

    monkeypatch.setattr(Store, "create", recorded)
    inner = ray.put("inner")
    assert workflow.run(gather.bind([ray.put(1), ray.put([inner])]), workflow_id="v")[0] == 1
    objects = [key for key in written if "/objects/" in key]
    graphs = [key for key in written if "/graphs/" in key]
    assert (len(objects), len(graphs)) == (3, 1)
    assert max(map(written.index, objects)) < written.index(graphs[0])
    assert "runs/v/definition.json" not in written[: written.index(graphs[0])]


def test_a_truncated_value_is_damage_and_not_a_value(flows: Path, marks: Path) -> None:
    """Fault 4."""
    big = marked.options(**named("big")).bind(marks, "big", "x" * 10_000)
    fail(refusing_until.bind(marks, "last", "mended", big), "w")
    (file,) = (flows / "runs" / "w").glob("*/values/big*")
    data = file.read_bytes()
    (marks / "mended").touch()
    for cut in (0, 1, len(data) // 2, len(data) - 1):
        file.write_bytes(data[:cut])
        with pytest.raises(VerlWorkflowError, match=file.name) as damaged:
            workflow.get_output("w", task_id="big")
        assert damaged.value.code is ErrorCode.JOURNAL_DAMAGED
    with pytest.raises(workflow.WorkflowExecutionError, match="is not the one that was recorded"):
        workflow.resume("w")
    assert executions(marks, "last") == 1
    file.write_bytes(data)
    assert workflow.resume("w") == "x" * 10_000
    assert executions(marks, "big") == 1


def test_a_continuation_of_a_step_that_is_not_kept_can_be_resumed(marks: Path) -> None:
    """Fault 5."""

    @ray.remote
    def outer(folder: Path) -> Any:
        mark(folder, "outer")
        inner = marked.options(**named("inner", checkpoint=True)).bind(folder, "inner", 3)
        return workflow.continuation(inner)

    skipped = outer.options(**workflow.options(checkpoint=False)).bind(marks)
    fail(refusing_until.bind(marks, "last", "mended", skipped), "w")
    (marks / "mended").touch()
    assert workflow.resume("w") == 3
    assert workflow.get_output("w", task_id="inner") == 3
    assert (executions(marks, "outer"), executions(marks, "inner")) == (1, 1)


def test_a_cancelled_workflow_stays_cancelled(marks: Path) -> None:
    """Fault 6."""
    workflow.run_async(waiting.bind(marks, "a", 1), workflow_id="w")
    started(marks, "a")
    workflow.cancel("w")
    go(marks)
    for again in (
        lambda: workflow.resume("w"),
        lambda: workflow.resume_async("w"),
        lambda: workflow.run(add.bind(1, 2), workflow_id="w"),
    ):
        with pytest.raises(workflow.WorkflowNotResumableError, match="it was cancelled"):
            again()
    assert workflow.resume_all(include_failed=True) == []
    end_hosts()
    with pytest.raises(workflow.WorkflowNotResumableError):
        workflow.resume("w")
    assert workflow.get_status("w") is workflow.CANCELED
    assert executions(marks, "a") == 1


def test_cancel_of_a_pending_workflow_does_not_wait_for_its_turn(tmp_path: Path, marks: Path) -> None:
    """Fault 7."""
    workflow.init(storage=str(tmp_path / "queue"), max_running_workflows=1)
    first = workflow.run_async(waiting.bind(marks, "a", 1), workflow_id="first")
    started(marks, "a")
    workflow.run_async(marked.bind(marks, "b", 2), workflow_id="second")
    third = workflow.run_async(marked.bind(marks, "c", 3), workflow_id="third")
    before = time.monotonic()
    workflow.cancel("second")
    assert time.monotonic() - before < 10
    assert workflow.get_status("second") is workflow.CANCELED
    assert workflow.get_status("first") is workflow.RUNNING
    go(marks)
    assert ray.get([first, third]) == [1, 3]
    assert executions(marks, "b") == 0


def test_cancel_of_a_successful_workflow_leaves_its_value_and_of_an_unknown_one_leaves_nothing(flows: Path) -> None:
    """Fault 8."""
    workflow.run(add.bind(1, 2), workflow_id="w")
    with pytest.raises(UserError) as refused:
        workflow.cancel("w")
    assert refused.value.code is ErrorCode.RUN_TERMINAL
    assert (workflow.get_status("w"), workflow.get_output("w")) == (workflow.SUCCESSFUL, 3)
    with pytest.raises(workflow.WorkflowNotFoundError):
        workflow.cancel("unknown")
    assert workflow.list_all() == [("w", workflow.SUCCESSFUL)]
    assert [path.name for path in (flows / "runs").iterdir()] == ["w"]


def test_max_retries_of_minus_one_is_any_number(marks: Path) -> None:
    """Fault 11."""

    @ray.remote(max_retries=-1)
    def dies(folder: Path, times: int) -> int:
        if mark(folder, "dies") <= times:
            os._exit(1)
        return 1

    @ray.remote(max_retries=-1, retry_exceptions=True)
    def raises(folder: Path, times: int) -> int:
        if mark(folder, "raises") <= times:
            raise Refused
        return 2

    assert workflow.run(add.bind(dies.bind(marks, 4), raises.bind(marks, 5))) == 3
    assert (executions(marks, "dies"), executions(marks, "raises")) == (5, 6)


def test_retry_exceptions_may_be_a_list_of_classes(marks: Path) -> None:
    """Fault 12."""

    @ray.remote
    def raises(folder: Path, name: str, error: Exception) -> int:
        if mark(folder, name) < 3:
            raise error
        return 1

    step = raises.options(retry_exceptions=[Refused, ZeroDivisionError], max_retries=4)
    assert workflow.run(add.bind(step.bind(marks, "a", Refused()), step.bind(marks, "b", ZeroDivisionError()))) == 2
    fail(step.bind(marks, "c", KeyError()), "w")
    assert [executions(marks, name) for name in "abc"] == [3, 3, 1]
    fail(step.bind(marks, "d", KeyError()), "v")
    (marks / "d.more").touch()
    assert workflow.resume("v") == 1


def test_any_id_is_listed_as_it_was_given_and_none_leads_out_of_the_storage(flows: Path) -> None:
    """Fault 13."""
    workflow.run(add.bind(1, 1), workflow_id="w")
    workflow.delete("w")
    outside = sorted(path for path in flows.parent.rglob("*") if flows not in path.parents)
    ids = ["x/y", "../esc", "a/../../b", "/root", "x=2Fy", "ünï", ".hidden", "con tab\t", "CASE", "case", "%2e%2e"]
    for number, name in enumerate(ids):
        assert workflow.run(add.bind(number, 0), workflow_id=name) == number
    assert {name for name, _ in workflow.list_all()} == set(ids)
    assert [workflow.get_output(name) for name in ids] == list(range(len(ids)))
    assert sorted(path for path in flows.parent.rglob("*") if flows not in path.parents) == outside
    assert len(list((flows / "runs").iterdir())) == len(ids)
    workflow.delete("../esc")
    assert {name for name, _ in workflow.list_all()} == set(ids) - {"../esc"}


def test_a_resumed_workflow_ends_after_it_has_started(marks: Path) -> None:
    """Fault 14."""
    begun = time.time()
    fail(refusing_until.options(**named("a")).bind(marks, "a", "mended"), "w")
    failed = workflow.get_metadata("w")["stats"]
    time.sleep(0.2)
    (marks / "mended").touch()
    workflow.resume("w")
    for stats in (workflow.get_metadata("w")["stats"], workflow.get_metadata("w", "a")["stats"]):
        assert begun <= stats["start_time"] <= failed["end_time"]
        assert failed["end_time"] + 0.2 <= stats["end_time"] <= time.time()


def test_early_events_of_equal_keys_are_kept_and_reach_their_own_workflows(flows: Path, marks: Path) -> None:
    """Fault 16."""
    refs = []
    for name in ("one", "two"):
        # The key is known only when the step before has ended: nobody listens yet.
        key = waiting.bind(marks, name, "approved")
        event = workflow.wait_for_event(workflow.StorageListener, key)
        refs.append(workflow.run_async(event, workflow_id=name))
        started(marks, name)
    for name in ("two", "one"):
        workflow.send_event(name, "approved", f"for {name}")
    go(marks)
    assert ray.get(refs, timeout=60) == [("approved", "for one"), ("approved", "for two")]


def test_limits_pauses_and_the_history_of_attempts_are_kept(marks: Path) -> None:
    """Fault 17."""

    @ray.remote
    def unlucky(folder: Path) -> str:
        count = mark(folder, "a")
        if count == 1:
            time.sleep(60)
        if count == 2:
            raise Refused("second")
        if count == 3:
            os._exit(1)
        return "fourth"

    policy = workflow.RetryPolicy(attempts=3, crashes=1, backoff_s=0.3, factor=1.0)
    step = unlucky.options(**named("a", timeout_s=1.0, retry=policy))
    assert workflow.run(step.bind(marks), workflow_id="w") == "fourth"
    attempts = workflow.get_metadata("w", "a")["attempts"]
    assert [(each["number"], each["status"]) for each in attempts] == [
        (1, "failed"),
        (2, "failed"),
        (3, "failed"),
        (4, "succeeded"),
    ]
    for each, words in zip(attempts, ("took longer than 1 s", "Refused: second", "was lost"), strict=False):
        assert words in each["error"]
    for before, after in itertools.pairwise(attempts):
        assert after["start_time"] - before["end_time"] >= 0.29


def test_the_code_of_each_step_is_recorded(marks: Path) -> None:
    """Fault 17."""
    workflow.run(gather.bind([add.bind(1, 2), marked.bind(marks, "a")]), workflow_id="w")
    workflow.run(add.bind(3, 4), workflow_id="v")
    codes = {}
    for name in ("w", "v"):
        record = workflow.read_run(store(), name).definition["workflow"]
        graph = read_graph(store(), record["graph"], record["sha256"])
        codes[name] = {node.name: node.code for node in graph.nodes}
    assert len(set(codes["w"].values())) == 3
    assert codes["v"]["_flows.add"] == codes["w"]["_flows.add"] != ""


class _Never(workflow.EventListener):
    async def poll_for_event(self) -> None:
        import asyncio

        await asyncio.sleep(3600)


def test_steps_that_only_wait_hold_neither_worker_nor_cpu() -> None:
    """Fault 18."""
    refs = [workflow.run_async(workflow.sleep(600), workflow_id=f"sleep{n}") for n in range(3)]
    events = gather.bind([workflow.wait_for_event(_Never) for _ in range(50)])
    refs.append(workflow.run_async(events, workflow_id="events"))
    until(
        lambda: all(
            any(step.status is workflow.StepStatus.RUNNING and "get_message" in name for name, step in steps_of(each))
            for each in ("sleep0", "sleep1", "sleep2", "events")
        ),
        "waiting steps",
    )
    assert ray.available_resources()["CPU"] == ray.cluster_resources()["CPU"]
    assert workflow.run(gather.options(num_cpus=4).bind([]), workflow_id="all cpus") == []
    before = time.monotonic()
    for name in ("sleep0", "sleep1", "sleep2", "events"):
        workflow.cancel(name)
    assert time.monotonic() - before < 20
    for ref in refs:
        with pytest.raises(workflow.WorkflowCancellationError):
            ray.get(ref)


def test_a_step_costs_few_writes(flows: Path) -> None:
    """Fault 20."""
    workflow.run(gather.bind([add.bind(n, n) for n in range(50)]), workflow_id="fan")
    files = [path for path in (flows / "runs" / "fan").rglob("*") if path.is_file()]
    assert len(files) < 2 * 51
    assert not list((flows / "runs" / "fan").glob("*/values/*add*"))

    node = add.bind(0, 0)
    for _ in range(20):
        node = add.bind(node, 1)
    workflow.run(node, workflow_id="chain")
    files = [path for path in (flows / "runs" / "chain").rglob("*") if path.is_file()]
    assert len(files) <= 21 + 10
