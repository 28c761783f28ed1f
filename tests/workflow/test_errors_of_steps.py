"""What becomes of errors, and of values that are not kept or cannot be."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
from _graphs import node, output, record, run_graph

from verl_workflow.errors import ErrorCode, UserError, VerlWorkflowError
from verl_workflow.storage import Store
from verl_workflow.workflow import RetryPolicy, RunStatus, WorkflowExecutionError, create_run, options, read_run
from verl_workflow.workflow._definition import run_key
from verl_workflow.workflow._records import StepsReset


def fail(text: str = "x") -> Any:
    raise KeyError(text)


def shown(value: Any) -> str:
    return repr(value)


@pytest.mark.parametrize("checkpoint", [None, False])
def test_a_caught_error_is_a_pair_whether_it_is_kept_or_not(store: Store, checkpoint: bool | None) -> None:
    graph = record(store, "r", node(shown, node(fail, task_id="f", catch_exceptions=True, checkpoint=checkpoint)))
    run_graph(store, "r", graph)
    assert output(store, "r") == "(None, KeyError('x'))"


@pytest.mark.parametrize("inner", [None, False, True])
def test_a_step_that_catches_is_a_pair_whatever_its_continuation_says(store: Store, inner: bool | None) -> None:
    def seven() -> int:
        return 7

    def outer() -> Any:
        return node(seven, catch_exceptions=inner)

    run_graph(store, "r", record(store, "r", node(outer, catch_exceptions=True)))
    assert output(store, "r") == (7, None)


def test_a_step_with_attempts_left_is_not_given_up_because_another_one_failed(store: Store, tmp_path: Path) -> None:
    def breaks() -> None:
        if not (tmp_path / "mended").exists():
            raise ValueError("broken")

    def flaky() -> int:
        (tmp_path / f"try-{time.monotonic_ns()}").touch()
        if len(list(tmp_path.glob("try-*"))) == 1:
            time.sleep(0.4)
            raise ConnectionError("transient")
        return 5

    def both(first: None, second: tuple[int, None]) -> Any:
        return second

    policy = RetryPolicy(attempts=5, backoff_s=0.0)
    graph = record(store, "r", node(both, node(breaks), node(flaky, catch_exceptions=True, retry=policy)))
    assert run_graph(store, "r", graph).status is RunStatus.FAILED
    (tmp_path / "mended").touch()
    assert run_graph(store, "r", graph).status is RunStatus.SUCCEEDED
    assert output(store, "r") == (5, None)


@pytest.mark.parametrize("kept", [False, True])
@pytest.mark.parametrize("error", [KeyError("x"), VerlWorkflowError(ErrorCode.STORAGE, "away", retryable=True)])
def test_a_step_that_is_executed_again_has_all_its_attempts_again(
    store: Store, tmp_path: Path, error: Exception, kept: bool
) -> None:
    tries = tmp_path / "tries"
    tries.touch()

    def flaky() -> int:
        with tries.open("a") as file:
            file.write(".")
        if len(tries.read_text()) % 2 == 1:
            raise error
        return len(tries.read_text())

    def last(value: int) -> int:
        if value == 2:
            raise ValueError("not yet")
        return value

    policy = RetryPolicy(attempts=2, crashes=1, backoff_s=0.0)
    graph = record(store, "r", node(last, node(flaky, checkpoint=kept, retry=policy)))
    assert run_graph(store, "r", graph).status is RunStatus.FAILED
    # Its value was not kept, or is not wanted any more.
    state = run_graph(store, "r", graph, reset=StepsReset(steps=["flaky"]) if kept else None)
    assert state.status is RunStatus.SUCCEEDED, state.error
    assert output(store, "r") == 4


def test_an_error_of_any_size_leaves_the_journal_small_and_is_caught_whole(store: Store) -> None:
    text = "x" * 1_000_000
    run_graph(store, "r", record(store, "r", node(fail, text)))
    entries = [store.get(key) or b"" for key in store.list(f"{run_key(store, 'r').folder}/journal")]
    assert sum(map(len, entries)) < 200_000
    assert (read_run(store, "r").error or {})["what"].startswith("KeyError: 'xxx")
    assert "more characters" in (read_run(store, "r").error or {})["what"]

    run_graph(store, "c", record(store, "c", node(fail, text, catch_exceptions=True)))
    _, error = output(store, "c")
    assert error.args == (text,)

    def outer() -> Any:
        return node(fail, text)

    run_graph(store, "o", record(store, "o", node(outer, catch_exceptions=True)))
    _, error = output(store, "o")
    assert error.args == (text,)
    entries = [store.get(key) or b"" for key in store.list(f"{run_key(store, 'o').folder}/journal")]
    assert sum(map(len, entries)) < 200_000


def refuses() -> None:
    raise RuntimeError("not here")


class Unloadable:
    def __reduce__(self) -> Any:
        return refuses, ()


def test_a_value_that_cannot_be_loaded_is_an_error_of_its_step_and_not_committed(store: Store) -> None:
    def attempts(run_id: str) -> list[str]:
        return [each.status.value for each in read_run(store, run_id).steps["made"].attempts]

    made = node(Unloadable, task_id="made", retry=RetryPolicy(attempts=2, backoff_s=0.0))
    state = run_graph(store, "r", record(store, "r", made))
    assert state.status is RunStatus.FAILED
    assert "not loaded again: RuntimeError: not here" in (state.error or {})["what"]
    assert attempts("r") == ["failed", "failed"]

    caught = node(Unloadable, task_id="made", catch_exceptions=True)
    assert run_graph(store, "caught", record(store, "caught", node(shown, caught))).status is RunStatus.SUCCEEDED
    assert "not loaded again" in output(store, "caught")


class Exits(Exception):
    def __str__(self) -> str:
        raise SystemExit(3)


def test_an_error_whose_text_ends_the_process_is_an_error_all_the_same(store: Store) -> None:
    def exits() -> None:
        raise Exits

    state = run_graph(store, "r", record(store, "r", node(shown, node(exits, task_id="e", catch_exceptions=True))))
    assert state.status is RunStatus.SUCCEEDED, state.error


def test_trouble_of_the_storage_is_not_the_steps_error(store: Store) -> None:
    class Troubled(Store):
        refused = 0

        def put(self, key: str, data: bytes) -> None:
            if "/values/" in key and not self.refused:
                self.refused += 1
                raise VerlWorkflowError(ErrorCode.STORAGE, "503 slow down", retryable=True)
            super().put(key, data)

    def large() -> bytes:
        return b"x" * 10_000

    troubled = Troubled(store.uri)
    graph = record(store, "r", node(large, catch_exceptions=True))
    run_graph(troubled, "r", graph)
    assert troubled.refused == 1
    assert output(store, "r") == (b"x" * 10_000, None)


def test_a_step_that_was_dropped_and_goes_on_is_not_carried_out(store: Store, tmp_path: Path) -> None:
    def unwanted() -> None:
        (tmp_path / "ran").touch()

    def slow() -> Any:
        time.sleep(0.4)
        return node(unwanted)

    def pair(*values: Any) -> Any:
        return values

    def scope() -> Any:
        return node(pair, node(fail), node(slow))

    state = run_graph(store, "r", record(store, "r", node(scope, catch_exceptions=True)))
    assert state.status is RunStatus.SUCCEEDED
    value, error = output(store, "r")
    assert value is None
    assert isinstance(error, KeyError)
    time.sleep(0.6)
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    "wrong",
    [{"timeout_s": "60"}, {"timeout_s": 0}, {"heartbeat_timeout_s": True}, {"retry": 3}],
)
def test_options_that_make_no_sense_are_refused_where_they_are_written(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(wrong))):
        options(**wrong)


def test_a_policy_takes_lists_of_classes_and_nothing_else() -> None:
    assert RetryPolicy(on=[ConnectionError]).takes(ConnectionError())  # type: ignore[arg-type]
    for wrong in (("ConnectionError",), ConnectionError, (3,)):
        with pytest.raises(TypeError, match="exception classes"):
            RetryPolicy(on=wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize("wrong", [{"attempts": float("inf")}, {"attempts": 2.0}, {"crashes": 1.5}])
def test_a_policy_counts_in_whole_numbers(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="whole number"):
        RetryPolicy(**wrong)


class Impatient(RetryPolicy):
    """A user's own."""


def test_a_graph_at_rest_knows_no_policy_of_a_users_class(store: Store) -> None:
    graph = record(store, "r", node(fail, retry=Impatient(attempts=2, on=(KeyError,))))
    assert type(graph.nodes[0].options.retry) is RetryPolicy
    assert graph.nodes[0].options.policy.attempts == 2


def test_an_error_of_this_package_that_the_step_itself_raises_is_the_steps(store: Store, tmp_path: Path) -> None:
    other = Store(str(tmp_path / "other"))
    create_run(other, "damaged", {})
    (tmp_path / "other/runs/damaged/definition.json").write_text("{")

    def looks() -> Any:
        return read_run(other, "damaged")

    def writes() -> None:
        Store("/proc/none").put("key", b"")

    for step, code in ((looks, ErrorCode.JOURNAL_DAMAGED), (writes, ErrorCode.STORAGE)):
        state = run_graph(store, step.__name__, record(store, step.__name__, node(step, catch_exceptions=True)))
        assert state.status is RunStatus.SUCCEEDED, state.error
        value, error = output(store, step.__name__)
        assert (value, error.code) == (None, code)


NEVER_AGAIN = VerlWorkflowError(ErrorCode.TRAINING_FAILED, "no")
MAY_PASS = VerlWorkflowError(ErrorCode.TRAINING_FAILED, "perhaps", retryable=True)


@pytest.mark.parametrize(
    ("error", "said", "attempts"),
    [
        (NEVER_AGAIN, {"retry": RetryPolicy(attempts=3, backoff_s=0.0)}, 1),
        (NEVER_AGAIN, {"retry": RetryPolicy(attempts=3, backoff_s=0.0, on=(VerlWorkflowError,))}, 3),
        (WorkflowExecutionError.of("inner", "x"), {"retry_exceptions": True, "max_retries": 2}, 3),
        (WorkflowExecutionError.of("inner", "x"), {"retry_exceptions": (WorkflowExecutionError,), "max_retries": 2}, 3),
        (UserError(ErrorCode.DATA_INVALID, "no"), {"retry_exceptions": (ValueError,), "max_retries": 2}, 3),
        (MAY_PASS, {"retry": RetryPolicy(attempts=3, backoff_s=0.0)}, 3),
        (MAY_PASS, {"retry": RetryPolicy(attempts=3, backoff_s=0.0, never=(VerlWorkflowError,))}, 1),
        (MAY_PASS, {"retry": RetryPolicy(attempts=3, backoff_s=0.0, on=(ConnectionError,))}, 1),
    ],
)
def test_a_policy_judges_the_errors_of_this_library_that_a_step_raises_as_any_other(
    store: Store, error: VerlWorkflowError, said: dict[str, Any], attempts: int
) -> None:
    def fails() -> None:
        raise error

    state = run_graph(store, "r", record(store, "r", node(fails, **said)))
    assert state.status is RunStatus.FAILED
    assert len(state.steps["fails"].attempts) == attempts
