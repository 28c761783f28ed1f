from __future__ import annotations

import pickle

import pytest

from verl_workflow.errors import ErrorCode, FencedError, UserError, UserErrors, VerlWorkflowError


@pytest.mark.parametrize("cls", [VerlWorkflowError, UserError, FencedError])
def test_an_error_crosses_processes_whole(cls: type[VerlWorkflowError]) -> None:
    error = cls(ErrorCode.CAPACITY, "too few", where="train", value=3, remedy="Add more.", retryable=True)
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is cls
    assert copy.to_json() == error.to_json()
    assert copy.value == 3


def test_the_message_gives_place_fact_value_and_remedy() -> None:
    error = UserError(
        ErrorCode.SPEC_INVALID, "unknown key", where="p.yaml:3:5", value="stpes", remedy="Did you mean steps?"
    )
    assert str(error) == "p.yaml:3:5: unknown key (got 'stpes'). Did you mean steps?"


def test_a_fact_that_ends_as_a_sentence_gets_no_second_stop() -> None:
    error = UserError(ErrorCode.USAGE_INVALID, "No such command. Did you mean 'logs'?", remedy="See --help.")
    assert str(error) == "No such command. Did you mean 'logs'? See --help."


def test_a_long_value_is_cut() -> None:
    assert len(str(UserError(ErrorCode.SPEC_INVALID, "too long", value="x" * 10_000))) < 300


@pytest.mark.parametrize("value", [16**5000, [16**5000], {"a": (16**5000,)}], ids=["number", "list", "mapping"])
def test_a_value_that_python_cannot_write_is_no_obstacle(value: object) -> None:
    error = UserError(ErrorCode.SPEC_INVALID, "too large", value=value)
    assert "too large (got " in str(error)
    assert len(str(error.to_json()["value"])) <= 200


def test_errors_found_together_stay_together() -> None:
    errors = UserErrors([UserError(ErrorCode.FILE_MISSING, "first"), UserError(ErrorCode.PARAM_INVALID, "second")])
    copy = pickle.loads(pickle.dumps(errors))
    assert [error.what for error in copy.errors] == ["first", "second"]
    assert copy.code is ErrorCode.FILE_MISSING
    assert str(copy) == "first\nsecond"
