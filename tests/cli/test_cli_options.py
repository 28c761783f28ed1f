from __future__ import annotations

import pytest

from verl_workflow.cli import _options
from verl_workflow.cli._words import command, duration, pace
from verl_workflow.errors import ErrorCode, UserErrors


def test_params_are_split_at_the_first_equals_sign() -> None:
    assert _options.params_of(["steps=5", "gate=a == b", "empty="]) == {"steps": "5", "gate": "a == b", "empty": ""}
    assert _options.params_of(None) == {}


def test_every_malformed_param_is_told() -> None:
    with pytest.raises(UserErrors) as caught:
        _options.params_of(["steps", "=5", "a=1", "a=2"])
    assert [error.value for error in caught.value.errors] == ["steps", "=5", "a=2"]
    assert {error.code for error in caught.value.errors} == {ErrorCode.PARAM_INVALID}


def test_the_storage_comes_from_option_environment_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("VERL_WORKFLOW_STORAGE", raising=False)
    assert _options.pipeline_storage_of(None) is None
    assert _options.storage_of(None) == ".verl-workflow"
    monkeypatch.setenv("VERL_WORKFLOW_STORAGE", "s3://bucket/a")
    assert _options.storage_of(None) == _options.pipeline_storage_of(None) == "s3://bucket/a"
    assert _options.storage_of("here") == "here"


def test_a_command_can_be_pasted(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path_factory.mktemp("with space")
    monkeypatch.chdir(folder)
    assert command("resume", "r1", (folder / ".verl-workflow").as_uri()) == "verl-workflow resume r1"
    assert command("logs", "r1", folder.as_uri(), "-f") == f"verl-workflow logs r1 -f --storage '{folder}'"
    assert command("resume", "r1", "s3://b/p") == "verl-workflow resume r1 --storage s3://b/p"


def test_durations_and_rates_read_well() -> None:
    assert [duration(s) for s in (None, 0, 59.6, 3599, 3600, 90061.0, float("nan"))] == [
        "-", "0:00", "1:00", "59:59", "1:00:00", "1d 01:01:01", "-",
    ]  # fmt: skip
    assert [pace(s) for s in (None, 2.04, 0.25, float("inf"))] == ["-", "2.0 s/step", "4.0 step/s", "-"]
