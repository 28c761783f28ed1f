from __future__ import annotations

import json

import pytest
from _journals import GOOD, failing, finish
from verl_airflow._runs import failure_of, find_run, holds, is_driven, result_of

from verl_workflow import FailureClass
from verl_workflow.errors import ErrorCode, UserError, VerlWorkflowError
from verl_workflow.storage import Store


def test_there_may_be_no_run(storage: str) -> None:
    assert find_run(storage, "night") is None
    assert not is_driven(None)
    assert holds(None, "left")
    assert not holds(None, "ended")


@pytest.mark.parametrize("kind", list(FailureClass))
def test_a_training_s_class_is_the_one_it_names(storage: str, kind: FailureClass) -> None:
    error = VerlWorkflowError(ErrorCode.TRAINING_FAILED, f"the training failed ({kind.value}): it said (data)")
    finish(storage, "night", failing(error))
    state = find_run(storage, "night")
    assert state is not None
    assert state.error is not None
    assert failure_of(state.error).kind is kind


@pytest.mark.parametrize(
    ("code", "kind", "hopeless"),
    [
        (ErrorCode.CAPACITY, FailureClass.CAPACITY, False),
        (ErrorCode.NO_PROGRESS, FailureClass.STALL, False),
        (ErrorCode.WORKER_LOST, FailureClass.INFRASTRUCTURE, False),
        (ErrorCode.STORAGE, FailureClass.INFRASTRUCTURE, False),
        (ErrorCode.STEP_FAILED, FailureClass.UNKNOWN, False),
        (ErrorCode.SPEC_INVALID, FailureClass.CONFIGURATION, True),
        (ErrorCode.MODEL_INVALID, FailureClass.UNKNOWN, True),
    ],
)
def test_other_errors_are_known_by_their_codes(code: ErrorCode, kind: FailureClass, hopeless: bool) -> None:
    found = failure_of(UserError(code, "something (data)").to_json())
    assert (found.kind, found.hopeless) == (kind, hopeless)


def test_an_error_of_a_later_version_is_of_unknown_class() -> None:
    found = failure_of({"code": "of_tomorrow", "message": "well"})
    assert (found.kind, found.message, found.hopeless) == (FailureClass.UNKNOWN, "well", False)


def test_the_result_of_a_large_sweep_stays_small(storage: str) -> None:
    from unittest.mock import patch

    names = [f"train-{number}" for number in range(200)]
    with patch.dict("_journals.KINDS", dict.fromkeys(names, "verl")):
        finish(storage, "night", dict.fromkeys(names, GOOD["train"]))
    state = find_run(storage, "night")
    assert state is not None
    result = result_of(state, storage)
    assert len(result["rewards"]) == 32
    assert len(json.dumps(result)) < 4_000


def test_a_value_that_is_damaged_does_not_make_a_success_of_none(storage: str) -> None:
    finish(storage, "night", {**GOOD, "train": lambda ctx: {"reward": {"last": 0.5}}})
    state = find_run(storage, "night")
    assert state is not None
    store = Store(storage)
    (key,) = [key for key in store.list("runs/night") if "/values/train" in key]
    store.put(key, b"{}")
    assert result_of(state, storage)["rewards"] == {}
    assert result_of(state, storage)["version"] == "v0001"
