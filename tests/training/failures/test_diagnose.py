from __future__ import annotations

import asyncio
import json
import re
import signal
from pathlib import Path
from typing import Any

import pytest
from _log_tails import HEALTHY, START, TAILS, Tail
from ray.exceptions import ActorDiedError, RayTaskError

from verl_workflow.spec import VerlStage
from verl_workflow.training._history import Outcome
from verl_workflow.training._retry import decide
from verl_workflow.training.failures import ADVICE, RETRYABLE, Failure, FailureClass, _diagnose, diagnose, error_chain
from verl_workflow.training.failures._rules import RULES
from verl_workflow.verl_config._compose import base_config, select

CODE = Path("/runs/r/code")
CUDA_OOM = "CUDA out of memory. Tried to allocate 2.00 GiB"


def of_error(error: BaseException, log: str = "", **more: Any) -> Failure:
    result = {"ok": False, "errors": error_chain(error)}
    return diagnose(result=result, code=1, log=log, code_dir=CODE, **more)


def of_log(log: str, code: int = 1, **more: Any) -> Failure:
    return diagnose(result=None, code=code, log=log, code_dir=CODE, **more)


def task_error(cause: Exception) -> Exception:
    """As ray.get raises it for an error in a remote function."""
    made: Exception = RayTaskError("run", "Traceback: GCS somewhere in the text", cause).as_instanceof_cause()
    return made


@pytest.mark.parametrize("tail", TAILS, ids=lambda tail: tail.name)
def test_what_a_log_ends_with_has_its_class(tail: Tail) -> None:
    found = of_log((START if tail.at_start else HEALTHY) + tail.text)
    assert found.kind.value == tail.kind
    assert found.preempted is tail.preempted
    assert found.evidence
    assert all(len(line) <= 500 for line in found.evidence)
    assert any(line in tail.text for line in found.evidence)
    assert found.advice


def test_there_are_enough_tails_and_each_class_that_a_log_shows_is_among_them() -> None:
    assert len(TAILS) >= 100
    assert len({tail.name for tail in TAILS}) == len(TAILS)
    shown = {tail.kind for tail in TAILS}
    assert shown == {kind.value for kind in FailureClass} - {"stall", "unknown"}


def test_each_rule_is_needed_by_some_tail(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rule without which every log is judged as before is dead, or hidden by another."""
    before = [of_log(tail.text) for tail in TAILS]
    strong, weak = _diagnose._STRONG, _diagnose._WEAK
    idle = []
    for rule in RULES:
        monkeypatch.setattr(_diagnose, "_STRONG", tuple(each for each in strong if each is not rule))
        monkeypatch.setattr(_diagnose, "_WEAK", tuple(each for each in weak if each is not rule))
        if all(of_log(tail.text) == found for tail, found in zip(TAILS, before, strict=True)):
            idle.append(rule.pattern.pattern)
    assert idle == []


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (ActorDiedError(), "infrastructure"),
        (task_error(ValueError("bad config")), "configuration"),
        (task_error(KeyError("prompt")), "data"),
        (AssertionError("real_train_batch_size (15) must be divisible"), "configuration"),
        (ValueError("Total available GPUs 0 is less than total desired GPUs 1"), "capacity"),
        (task_error(RuntimeError(CUDA_OOM)), "memory.gpu"),
        (FileNotFoundError(2, "No such file", "/x/global_step_4/actor/model_world_size_1_rank_0.pt"), "checkpoint"),
        (OSError(28, "No space left on device"), "disk"),
        (RuntimeError("PytorchStreamReader failed reading zip archive"), "checkpoint"),
        (ConnectionError("lost the connection to GCS"), "infrastructure"),
        (RuntimeError("something nobody has seen"), "unknown"),
    ],
)
def test_an_error_has_its_class(error: Exception, kind: str) -> None:
    found = of_error(error)
    assert found.kind.value == kind
    assert found.evidence
    assert found.what


def test_what_followed_from_something_gives_way_to_what_the_log_shows_of_it() -> None:
    log = "(WorkerDict pid=9) torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 3.1 GiB\n"
    found = of_error(ActorDiedError(), log)
    assert found.kind is FailureClass.MEMORY_GPU
    assert found.evidence == (
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 3.1 GiB",
        "ActorDiedError: The actor died unexpectedly before finishing this task.",
    )
    assert found.what.startswith("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 3.1 GiB (and then: ")
    assert "ppo_micro_batch_size_per_gpu" in found.advice
    assert of_error(ValueError("bad config"), HEALTHY).kind is FailureClass.CONFIGURATION


def test_memory_that_ran_out_while_saving_is_a_class_of_its_own() -> None:
    frames = '  File "/x/verl/utils/checkpoint/fsdp_checkpoint_manager.py", line 1, in save_checkpoint\n'
    log = (
        frames + "    state = model.state_dict()\ntorch.OutOfMemoryError: CUDA out of memory. Tried to allocate 9 GiB\n"
    )
    assert of_log(log).kind is FailureClass.MEMORY_SAVE
    assert of_error(ActorDiedError(), log).kind is FailureClass.MEMORY_SAVE
    assert of_log(log.replace("save_checkpoint", "update_actor").replace("_checkpoint_m", "_m")).kind is (
        FailureClass.MEMORY_GPU
    )
    disk = frames + "OSError: [Errno 28] No space left on device\n"
    assert of_log(disk).kind is FailureClass.DISK


def test_what_ray_only_guesses_at_is_no_evidence() -> None:
    guess = "The actor is dead. Some common causes include: (1) the process was killed by the OOM killer"
    error = RuntimeError(f"ActorDiedError: worker died\n{guess}")
    assert of_error(error).kind is FailureClass.INFRASTRUCTURE
    assert not any("OOM" in line for line in of_error(error).evidence)


RAISED = (
    "(AgentLoopWorkerTQ pid=9) Traceback (most recent call last):\n"
    f'(AgentLoopWorkerTQ pid=9)   File "{CODE}/reward.py", line 2, in score\n'
    "(AgentLoopWorkerTQ pid=9) ZeroDivisionError: division by zero\n"
)
NO_ANSWERS = RuntimeError("Sync replay buffer selected terminal groups")
STEP = "(TaskRunnerV1 pid=1) step:7 - actor/pg_loss:0.1 - timing_s/save_checkpoint:4.1\n"
OOM = "(WorkerDict pid=7) torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB\n"


def test_what_the_reward_raised_is_told_with_its_line() -> None:
    found = of_error(NO_ANSWERS, RAISED)
    assert found.kind is FailureClass.REWARD
    assert found.what == "reward.py:2 in score raised ZeroDivisionError: division by zero"
    assert found.evidence == (
        "ZeroDivisionError: division by zero",
        f'File "{CODE}/reward.py", line 2, in score',
    )
    # verl takes steps for a while although answers are lost.
    assert of_error(NO_ANSWERS, RAISED + STEP).kind is FailureClass.REWARD


def test_answers_that_never_came_since_their_process_was_lost() -> None:
    died = "(AgentLoopWorkerTQ pid=9) ray.exceptions.ActorDiedError: The actor died unexpectedly before finishing.\n"
    found = of_error(NO_ANSWERS, STEP + died)
    assert found.kind is FailureClass.INFRASTRUCTURE
    assert found.what.startswith("ray.exceptions.ActorDiedError: The actor died")
    assert "Sync replay buffer selected terminal groups" in found.what
    assert of_error(NO_ANSWERS, died + STEP).kind is FailureClass.UNKNOWN, "that was survived"
    assert of_error(NO_ANSWERS, STEP + died + RAISED).kind is FailureClass.REWARD


def test_what_answers_were_lost_by_is_told_although_its_class_is_not_known() -> None:
    lost = (
        "(AgentLoopWorkerTQ pid=9) ERROR:2026-12-01 16:57:12,402:Error in _run_prompt for uid=412735fb\n"
        "(AgentLoopWorkerTQ pid=9) Traceback (most recent call last):\n"
        '(AgentLoopWorkerTQ pid=9)   File "/site-packages/some/tool.py", line 695, in call\n'
        "(AgentLoopWorkerTQ pid=9) SomeToolError: it did not feel like it\n"
    )
    found = of_error(NO_ANSWERS, STEP + lost)
    assert found.kind is FailureClass.UNKNOWN
    assert found.what.startswith("SomeToolError: it did not feel like it (and then: RuntimeError: Sync replay buffer")
    assert found.evidence[0] == "SomeToolError: it did not feel like it"


def test_a_reward_that_raised_here_and_there_is_not_why_something_else_failed() -> None:
    assert of_error(ActorDiedError(), RAISED).kind is FailureClass.INFRASTRUCTURE
    assert of_error(KeyError("prompt"), RAISED).kind is FailureClass.DATA
    assert of_error(ValueError("bad config"), RAISED + STEP).kind is FailureClass.CONFIGURATION
    assert of_log(RAISED + OOM).kind is FailureClass.MEMORY_GPU


def test_a_missing_column_that_the_reward_asked_for_is_the_rewards() -> None:
    log = RAISED.replace("ZeroDivisionError: division by zero", "KeyError: 'ground_truth'")
    assert of_error(KeyError("ground_truth"), log).kind is FailureClass.REWARD


def test_a_log_that_warns_of_nccl_and_ends_in_the_reward_is_the_rewards() -> None:
    nccl = "node1:117:903 [0] NCCL WARN NET/Socket: Connection reset by peer, retrying after a timeout\n"
    assert of_log(STEP + nccl + RAISED).kind is FailureClass.REWARD
    assert of_log(STEP + RAISED + nccl).kind is FailureClass.INFRASTRUCTURE


@pytest.mark.parametrize(
    "line",
    [
        "(raylet) [2026-11-30 10:05:37,313 E 95 95] (raylet) file_system_monitor.cc:116: /tmp/ray/session is over 95% "
        "full, available space: 42.6695 GB; capacity: 876.137 GB. Object creation will fail if spilling is required.",
        "(raylet) [2026-11-30 10:05:37,313 E 95 95] (raylet) node_manager.cc:3277: 0 Workers (tasks / actors) killed "
        "due to memory pressure (OOM), 3 Workers crashed due to other reasons at node (ID: 8289)",
        "(vLLMHttpServer pid=5) WARNING 10-15 08:32:29 [scheduler.py:9] Sequence group 12 is preempted by "
        "PreemptionMode.RECOMPUTE mode because there is not enough KV cache space.",
        "(WorkerDict pid=5) [W1130 01:05:17.459 socket.cpp:755] [c10d] The server socket has failed to bind to [::]:1 "
        "(errno: 98 - Address already in use).",
        "(WorkerDict pid=5) WARN: rank 0 grad_norm is not finite: nan",
        "(WorkerDict pid=5) FSDP param_offload is off; CUDA runs out of memory sooner, see --help",
        "wandb: Network error (ReadTimeout), entering retry loop.",
        "/x/engine.py:32: UserWarning: engine missing: ModuleNotFoundError(\"No module named 'flash_attn'\")",
        "(vLLMHttpServer pid=5) WARNING 10-15 08:32:29 [worker.py:9] CUDA out of memory with 1024, trying 512",
    ],
)
def test_what_is_said_in_healthy_runs_too_decides_nothing(line: str) -> None:
    found = of_error(ActorDiedError(), f"{STEP}{line}\n")
    assert (found.kind, found.preempted) == (FailureClass.INFRASTRUCTURE, False)
    assert of_error(RuntimeError("something nobody has seen"), f"{STEP}{line}\n").kind is FailureClass.UNKNOWN


def test_what_came_before_the_last_step_was_survived() -> None:
    wandb = "(TaskRunnerV1 pid=1) wandb.errors.errors.CommError: the server does not answer\n"
    assert of_error(ActorDiedError(), STEP + wandb + STEP + STEP).kind is FailureClass.INFRASTRUCTURE
    assert of_error(ActorDiedError(), STEP + wandb).kind is FailureClass.TRACKER


def test_a_line_that_reached_the_log_late_is_seen() -> None:
    assert of_error(ActorDiedError(), STEP + OOM + STEP).kind is FailureClass.MEMORY_GPU


def test_the_earliest_telling_line_wins() -> None:
    full = "(WorkerDict pid=8) OSError: [Errno 28] No space left on device: '/runs/n'\n"
    assert of_log(STEP + OOM + full).kind is FailureClass.MEMORY_GPU
    assert of_log(STEP + full + OOM).kind is FailureClass.DISK


def test_evidence_is_told_once_for_all_ranks_without_whose_it_is() -> None:
    log = "".join(
        f"\x1b[36m(WorkerDict pid={rank}, ip=10.0.0.{rank})\x1b[0m torch.OutOfMemoryError: CUDA out of memory. GPU "
        f"{rank} has 79 GiB [repeated {rank}x across cluster]\n"
        for rank in range(8)
    )
    assert of_log(log).evidence == ("torch.OutOfMemoryError: CUDA out of memory. GPU 0 has 79 GiB",)


def test_what_was_being_handled_when_an_error_was_raised_is_not_its_cause() -> None:
    try:
        try:
            raise KeyError("a key of a cache")
        except KeyError:
            raise RuntimeError("something nobody has seen")  # noqa: B904 - what is tested
    except RuntimeError as error:
        found = of_error(error)
    assert found.kind is FailureClass.UNKNOWN
    assert found.what == "RuntimeError: something nobody has seen"


def test_a_time_out_of_a_tracker_is_not_taken_for_a_cancellation() -> None:
    wait = TimeoutError()
    wait.__cause__ = asyncio.CancelledError()
    error = type("CommError", (Exception,), {"__module__": "wandb.errors.errors"})("Run initialization has timed out")
    error.__cause__ = wait
    assert of_error(error).kind is FailureClass.TRACKER


def test_a_checkpoint_is_at_fault_only_while_it_is_loaded() -> None:
    line = "FileNotFoundError: [Errno 2] No such file: '/c/global_step_8/actor/model_world_size_1_rank_0.pt'\n"
    assert of_log(line).kind is FailureClass.CHECKPOINT
    written = of_log(STEP + line)
    assert written.kind is FailureClass.INFRASTRUCTURE
    assert "file system" in written.advice
    fresh = of_log(
        "safetensors_rust.SafetensorError: Error while deserializing header: HeaderTooLarge\n", resumed=False
    )
    assert fresh.kind is FailureClass.CONFIGURATION
    assert "model itself" in fresh.advice


def test_memory_that_ran_out_after_a_save_is_not_the_saves() -> None:
    assert of_log(STEP + OOM).kind is FailureClass.MEMORY_GPU


def test_a_worker_lost_while_it_saved_is_told_to_look_for_memory() -> None:
    saving = '  File "/x/verl/trainer/ppo/v1/trainer_base.py", line 1002, in _save_checkpoint\n'
    found = of_error(ActorDiedError(), STEP + saving)
    assert found.kind is FailureClass.INFRASTRUCTURE
    assert "while it saved" in found.advice
    assert "while it saved" not in of_error(ActorDiedError(), STEP).advice


def test_words_that_only_mention_a_failure_are_none() -> None:
    mentions = (
        "If you run out of memory, reduce the micro batch size.\n"
        "NCCL WARN NET/Socket: timeout of 600 s is set\n"
        "Training resumes from a checkpoint after preemption if one exists\n"
        "'custom_cls': {'path': None}, 'wandb_proxy': None, 'disk': 'No limit'\n"
        "step:3 - actor/pg_loss:0.1 - critic/score/mean:0.5\n"
    )
    assert of_error(RuntimeError("something nobody has seen"), mentions).kind is FailureClass.UNKNOWN


@pytest.mark.parametrize(
    ("code", "kind", "said"),
    [
        (-signal.SIGKILL, "infrastructure", "SIGKILL"),
        (-signal.SIGTERM, "infrastructure", "SIGTERM"),
        (-signal.SIGBUS, "memory.host", "SIGBUS"),
        (3, "infrastructure", "exit code 3"),
        (137, "infrastructure", "SIGKILL"),
        (-200, "infrastructure", "signal 200"),
    ],
)
def test_a_process_that_says_nothing_is_judged_by_its_end(code: int, kind: str, said: str) -> None:
    found = of_log(HEALTHY, code)
    assert found.kind.value == kind
    assert said in found.what


def test_what_was_logged_of_settings_does_not_kill_a_process() -> None:
    found = of_log("ValueError: an answer could not be parsed, and counts as wrong\n", -signal.SIGKILL)
    assert found.kind is FailureClass.INFRASTRUCTURE
    assert "dmesg" in found.advice


def test_a_loss_while_a_node_is_drained_is_a_preemption() -> None:
    assert of_error(ActorDiedError(), drained=["ab12"]).preempted
    assert of_log(HEALTHY, -9, drained=["ab12"]).preempted
    assert not of_log(HEALTHY, -9).preempted
    assert not of_error(ValueError("bad config"), drained=["ab12"]).preempted


def test_a_result_that_claims_success_is_not_believed_against_the_exit_code() -> None:
    found = diagnose(result={"ok": True}, code=-11, log="", code_dir=CODE)
    assert "SIGSEGV" in found.what


def test_a_failure_is_the_same_after_being_written_down() -> None:
    found = of_error(ActorDiedError(), drained=["ab12"])
    assert Failure.from_json(json.loads(json.dumps(found.to_json()))) == found


@pytest.mark.parametrize("kind", FailureClass)
def test_what_may_pass_unchanged_is_what_is_tried_again_by_default(kind: FailureClass) -> None:
    fields = {"algorithm": "grpo", "steps": 9, "train": "${a.train}", "validation": "${a.validation}"}
    spec = VerlStage(
        name="train", **fields, model="m", batch_size=8, save_every=1, reward={"function": "reward.py:score"}
    )
    failed = Outcome(attempt=1, epoch=1, began=0.0, ended=1.0, failure=Failure(kind=kind, what="w"))
    tried = decide(spec.model_copy(update={"retry": spec.retry.model_copy(update={"attempts": 3})}), [failed], {})
    assert tried.again is (kind in RETRYABLE)


def test_each_key_of_verls_that_advice_names_is_one() -> None:
    config = base_config()
    texts = [*ADVICE.values(), *(rule.advice for rule in RULES)]
    keys = {key for text in texts for key in re.findall(r"\b(?:actor_rollout_ref|data|trainer|critic)\.[\w.]*\w", text)}
    assert len(keys) > 10
    added = {"actor_rollout_ref.model.override_config.attn_implementation"}
    assert [key for key in keys - added if not _is_key(config, key)] == []


def _is_key(config: Any, key: str) -> bool:
    parent, _, name = key.rpartition(".")
    above = select(config, parent)
    return above is not None and name in above


def test_each_class_has_advice() -> None:
    assert set(ADVICE) == set(FailureClass)
    assert all(text.endswith(".") for text in ADVICE.values())
    assert all(not rule.advice or rule.advice.endswith(".") for rule in RULES)
    assert set(FailureClass) > RETRYABLE


def test_a_critic_without_flash_attention_is_told_what_it_lacks() -> None:
    found = of_error(RuntimeError("model(/m) is not a value head model, please install trl to make it valid"))
    assert "flash-attn" in found.advice
