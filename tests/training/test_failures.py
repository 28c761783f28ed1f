from __future__ import annotations

from pathlib import Path

import pytest
from ray.exceptions import ActorDiedError, RayTaskError

from verl_workflow.training._failures import (
    ADVICE,
    FailureClass,
    advice,
    classify,
    error_chain,
    headline,
    raised_by_user,
)

CUDA_OOM = "CUDA out of memory. Tried to allocate 2.00 GiB"


def task_error(cause: Exception) -> Exception:
    """As ray.get raises it for an error in a remote function."""
    made: Exception = RayTaskError("run", "Traceback: GCS somewhere in the text", cause).as_instanceof_cause()
    return made


def test_a_critic_without_flash_attention_is_told_what_it_lacks() -> None:
    text = "RuntimeError: model(/m) is not a value head model, please install trl to make it valid"
    assert "flash-attn" in advice(FailureClass.USER, text)
    assert advice(FailureClass.USER, "ValueError: bad config") == ADVICE[FailureClass.USER]


@pytest.mark.parametrize(
    ("error", "expected", "retryable"),
    [
        (ActorDiedError(), FailureClass.INFRASTRUCTURE, True),
        (task_error(ValueError("bad config")), FailureClass.USER, False),
        (task_error(KeyError("prompt")), FailureClass.USER, False),
        (AssertionError("real_train_batch_size (15) must be divisible"), FailureClass.USER, False),
        (ValueError("Total available GPUs 0 is less than total desired GPUs 1"), FailureClass.CAPACITY, False),
        (task_error(RuntimeError(CUDA_OOM)), FailureClass.MEMORY, False),
        (
            FileNotFoundError(2, "No such file", "/x/global_step_4/actor/model_world_size_1_rank_0.pt"),
            FailureClass.CHECKPOINT,
            True,
        ),
        (OSError(28, "No space left on device"), FailureClass.DISK, False),
        (RuntimeError("PytorchStreamReader failed reading zip archive"), FailureClass.CHECKPOINT, True),
        (ConnectionError("lost the connection to GCS"), FailureClass.INFRASTRUCTURE, True),
        (RuntimeError("something nobody has seen"), FailureClass.UNKNOWN, False),
    ],
)
def test_class_of_a_failure(error: Exception, expected: FailureClass, retryable: bool) -> None:
    found = classify(error_chain(error))
    assert found is expected
    assert found.retryable is retryable


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


LOG = """\
(TaskRunnerV1 pid=7)   'path': '/runs/r/code/reward.py',
(AgentLoopWorkerTQ pid=9, ip=10.0.0.2) Traceback (most recent call last):
(AgentLoopWorkerTQ pid=9, ip=10.0.0.2)   File "/runs/r/code/reward.py", line 2, in score
(AgentLoopWorkerTQ pid=9, ip=10.0.0.2)     return float(int(solution_str) == 3)
(AgentLoopWorkerTQ pid=9, ip=10.0.0.2) ValueError: invalid literal for int() with base 10: 'C'
(AgentLoopWorkerTQ pid=9, ip=10.0.0.2)   File "/site-packages/verl/trainer.py", line 5, in fit
RuntimeError: Sync replay buffer selected terminal groups
"""


def test_what_the_users_code_raised_is_found_in_the_log() -> None:
    assert raised_by_user(LOG, Path("/runs/r/code")) == (
        "reward.py:2 in score raised ValueError: invalid literal for int() with base 10: 'C'"
    )


def test_what_others_raised_is_not_laid_to_the_user() -> None:
    assert raised_by_user(LOG, Path("/runs/other/code")) is None
    elsewhere = LOG.replace('File "/runs/r/code/reward.py"', 'File "/site-packages/verl/x.py"')
    assert raised_by_user(elsewhere, Path("/runs/r/code")) is None
