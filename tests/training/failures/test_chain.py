from __future__ import annotations

from pathlib import Path

from verl_workflow.training.failures._chain import error_chain, headline
from verl_workflow.training.failures._log import Raised, plain, raised_by_user

LOG = """\
(TaskRunnerV1 pid=7)   'path': '/runs/r/code/reward.py',
(AgentLoopWorkerTQ pid=9, ip=10.0.0.2) Traceback (most recent call last):
(AgentLoopWorkerTQ pid=9, ip=10.0.0.2)   File "/runs/r/code/reward.py", line 2, in score
(AgentLoopWorkerTQ pid=9, ip=10.0.0.2)     return float(int(solution_str) == 3)
(AgentLoopWorkerTQ pid=9, ip=10.0.0.2) ValueError: invalid literal for int() with base 10: 'C'
(AgentLoopWorkerTQ pid=9, ip=10.0.0.2)   File "/site-packages/verl/trainer.py", line 5, in fit
RuntimeError: Sync replay buffer selected terminal groups
"""
LINES = [plain(line) for line in LOG.splitlines()]


def test_the_innermost_error_is_what_is_told() -> None:
    try:
        try:
            raise KeyError("reward_model")
        except KeyError as cause:
            raise RuntimeError("training failed\nfor a reason") from cause
    except RuntimeError as error:
        chain = error_chain(error)
    assert [link["type"] for link in chain] == ["builtins.RuntimeError", "builtins.KeyError"]
    assert headline(chain) == "KeyError: 'reward_model'"
    assert headline([]) == "no error was recorded"


def test_an_error_raised_from_none_stands_alone() -> None:
    try:
        try:
            raise KeyError("k")
        except KeyError:
            raise RuntimeError("r") from None
    except RuntimeError as error:
        assert [link["type"] for link in error_chain(error)] == ["builtins.RuntimeError"]


def test_a_chain_says_what_caused_and_what_was_only_being_handled() -> None:
    try:
        try:
            raise KeyError("k")
        except KeyError:
            raise RuntimeError("r") from OSError("o")
    except RuntimeError as error:
        assert [link["by"] for link in error_chain(error)] == ["cause", "cause"]
    try:
        try:
            raise KeyError("k")
        except KeyError:
            raise RuntimeError("r")  # noqa: B904 - what is tested
    except RuntimeError as error:
        chain = error_chain(error)
    assert [link["by"] for link in chain] == ["cause", "context"]
    assert headline(chain) == "RuntimeError: r"


def test_errors_that_refer_to_each_other_end() -> None:
    first, second = ValueError("a"), ValueError("b")
    first.__cause__, second.__cause__ = second, first
    assert len(error_chain(first)) == 2


def test_lines_lose_their_colours_and_their_worker() -> None:
    assert plain("\x1b[36m(WorkerDict pid=9, ip=10.0.0.2)\x1b[0m  ValueError: x  ") == " ValueError: x"


def test_what_the_users_code_raised_is_found_in_the_log() -> None:
    assert raised_by_user(LINES, Path("/runs/r/code")) == Raised(
        where="reward.py:2 in score",
        error="ValueError: invalid literal for int() with base 10: 'C'",
        place=4,
    )


def test_a_line_of_another_process_between_hides_nothing() -> None:
    lines = [*LINES[:4], "INFO:     10.1.6.81:16983 - POST /generate HTTP/1.1 200 OK", *LINES[4:]]
    found = raised_by_user(lines, Path("/runs/r/code"))
    assert found is not None
    assert found.error == "ValueError: invalid literal for int() with base 10: 'C'"


def test_an_exception_of_the_users_own_is_found_whatever_its_name() -> None:
    lines = [
        line.replace("ValueError: invalid literal for int() with base 10: 'C'", "reward.BadAnswer") for line in LINES
    ]
    found = raised_by_user(lines, Path("/runs/r/code"))
    assert found is not None
    assert found.error == "reward.BadAnswer"


def test_what_others_raised_is_not_laid_to_the_user() -> None:
    assert raised_by_user(LINES, Path("/runs/other/code")) is None
    elsewhere = [line.replace('File "/runs/r/code/reward.py"', 'File "/site-packages/verl/x.py"') for line in LINES]
    assert raised_by_user(elsewhere, Path("/runs/r/code")) is None
