from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from verl_workflow.verl_config import Code, Finding, Severity, lint, of_overrides

ACTOR = "actor_rollout_ref.actor"
ROLLOUT = "actor_rollout_ref.rollout"
# A small configuration with which nothing is wrong.
SOUND = {
    "algorithm.adv_estimator": "grpo",
    "data.train_batch_size": "64",
    "actor_rollout_ref.model.path": "/models/qwen",
    f"{ACTOR}.ppo_mini_batch_size": "32",
    f"{ACTOR}.ppo_micro_batch_size_per_gpu": "4",
    f"{ROLLOUT}.name": "vllm",
    f"{ROLLOUT}.n": "8",
    f"{ROLLOUT}.log_prob_micro_batch_size_per_gpu": "4",
    f"{ROLLOUT}.tensor_model_parallel_size": "1",
    "trainer.n_gpus_per_node": "8",
    "trainer.save_freq": "20",
    "trainer.logger": "[console,file]",
    "trainer.default_local_dir": "/runs/n",
}


def found(changes: dict[str, str] | None = None, rows: int | None = None) -> list[Finding]:
    return lint(of_overrides([f"{key}={value}" for key, value in {**SOUND, **(changes or {})}.items()]), rows=rows)


def codes(changes: dict[str, str], rows: int | None = None) -> list[str]:
    return [finding.code.value for finding in found(changes, rows)]


@pytest.fixture(autouse=True)
def no_credentials(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("WANDB_API_KEY", "WANDB_MODE", "WANDB_DISABLED", "MLFLOW_TRACKING_URI", "SWANLAB_API_KEY"):
        monkeypatch.delenv(name, raising=False)


def test_nothing_is_wrong_with_a_sound_configuration() -> None:
    assert found() == []
    assert found(rows=64) == []


@pytest.mark.parametrize(
    ("changes", "code"),
    [
        ({"trainer.max_ckpt_to_keep": "3"}, Code.UNKNOWN_KEY),
        ({"+trainer.max_ckpt_to_keep": "3"}, Code.UNKNOWN_KEY),
        ({f"++{ROLLOUT}.temprature": "1.0"}, Code.UNKNOWN_KEY),
        ({"+trainer.of_nobody": "1"}, Code.UNKNOWN_KEY),
        ({"custom_reward_function.path": "/x.py"}, Code.LEGACY_KEY),
        ({"reward_model.enable": "True"}, Code.LEGACY_KEY),
        ({"data.truncation": "left"}, Code.WITHOUT_EFFECT),
        ({"trainer.total_epochs": "abc"}, Code.WRONG_TYPE),
        ({f"{ROLLOUT}.n": "abc"}, Code.WRONG_TYPE),
        ({"trainer.logger": "[foo]"}, Code.NOT_ONE_OF),
        ({"trainer.resume_mode": "foo"}, Code.NOT_ONE_OF),
        ({"algorithm.adv_estimator": "grpoo"}, Code.NOT_ONE_OF),
        ({f"{ACTOR}.strategy": "foo"}, Code.NOT_ONE_OF),
        ({f"{ROLLOUT}.name": "foo"}, Code.NOT_ONE_OF),
        ({f"{ACTOR}.checkpoint.save_contents": "[foo]"}, Code.NOT_ONE_OF),
        ({"reward.reward_manager.name": "foo"}, Code.NOT_ONE_OF),
        ({f"{ROLLOUT}.gpu_memory_utilization": "1.5"}, Code.OUT_OF_RANGE),
        ({"trainer.n_gpus_per_node": "0"}, Code.OUT_OF_RANGE),
        ({"trainer.nnodes": "-1"}, Code.OUT_OF_RANGE),
        ({"data.train_batch_size": "0"}, Code.OUT_OF_RANGE),
        ({f"{ROLLOUT}.n": "0"}, Code.OUT_OF_RANGE),
        ({f"{ROLLOUT}.tensor_model_parallel_size": "0"}, Code.OUT_OF_RANGE),
        ({f"{ACTOR}.ppo_micro_batch_size_per_gpu": "0"}, Code.OUT_OF_RANGE),
        ({f"{ACTOR}.optim.lr": "-1e-6"}, Code.OUT_OF_RANGE),
        ({f"{ACTOR}.ppo_mini_batch_size": "128"}, Code.BATCH_ARITHMETIC),
        ({f"{ACTOR}.ppo_micro_batch_size_per_gpu": "5"}, Code.BATCH_ARITHMETIC),
        ({"data.train_batch_size": "63", f"{ROLLOUT}.n": "3"}, Code.BATCH_ARITHMETIC),
        ({f"{ROLLOUT}.tensor_model_parallel_size": "3"}, Code.WORLD_SIZE),
        ({f"{ROLLOUT}.tensor_model_parallel_size": "16"}, Code.WORLD_SIZE),
        ({f"{ACTOR}.ppo_micro_batch_size_per_gpu": "null"}, Code.MICRO_BATCH_MISSING),
        ({f"{ROLLOUT}.log_prob_micro_batch_size": "4"}, Code.MICRO_BATCH_TWICE),
        ({f"{ROLLOUT}.n": "1"}, Code.TOO_FEW_ROLLOUTS),
        ({"algorithm.adv_estimator": "gae", "critic.ppo_micro_batch_size_per_gpu": "4"}, Code.CRITIC_MODEL_MISSING),
        ({"trainer.save_freq": "-1"}, Code.NO_CHECKPOINTS),
        ({"trainer.max_actor_ckpt_to_keep": "1"}, Code.ONLY_ONE_CHECKPOINT),
        ({"trainer.remove_previous_ckpt_in_save": "True"}, Code.ONLY_ONE_CHECKPOINT),
        ({f"{ACTOR}.checkpoint.async_save": "True"}, Code.ASYNC_SAVE),
        ({"trainer.resume_mode": "resume_path"}, Code.RESUME_PATH_MISSING),
        ({"trainer.default_local_dir": "checkpoints/x"}, Code.RELATIVE_PATH),
        ({"data.train_files": "data/train.parquet"}, Code.RELATIVE_PATH),
        ({"data.train_files": "/nowhere/train.parquet"}, Code.FILE_MISSING),
        ({"reward.custom_reward_function.path": "/nowhere/reward.py"}, Code.FILE_MISSING),
        ({"trainer.val_only": "True", "trainer.val_before_train": "False"}, Code.VAL_ONLY_TRAINS),
        ({"trainer.use_v1": "False"}, Code.OLD_TRAINER),
        ({"trainer.logger": "[console,wandb]"}, Code.CREDENTIALS_MISSING),
        ({"trainer.logger": "mlflow"}, Code.CREDENTIALS_MISSING),
        ({"actor@actor_rollout_ref.actor": "no_such_actor"}, Code.CANNOT_BE_READ),
    ],
)
def test_what_is_wrong_is_found_and_nothing_else(changes: dict[str, str], code: Code) -> None:
    [finding] = found(changes)
    assert finding.code is code
    key = next(iter(changes))
    assert finding.where == f"{key}={changes[key]}" or finding.where.lstrip("+") in {
        f"{name}={value}" for name, value in {**SOUND, **changes}.items()
    } | {""}
    assert finding.remedy.endswith((".", "?"))


def test_too_few_rows_and_epochs_that_end_too_early() -> None:
    assert codes({}, rows=63) == ["too_few_rows"]
    assert codes({"trainer.total_training_steps": "31", "trainer.total_epochs": "15"}, rows=128) == ["ends_early"]
    assert codes({"trainer.total_training_steps": "30", "trainer.total_epochs": "15"}, rows=128) == []


def test_rows_of_local_files_are_counted(tmp_path: Path) -> None:
    import pyarrow as pa
    from pyarrow import parquet

    parquet.write_table(pa.table({"prompt": ["x"] * 40}), tmp_path / "a.parquet")
    one = f"[{tmp_path}/a.parquet]"
    assert codes({"data.train_files": one}) == ["too_few_rows"]
    assert codes({"data.train_files": f"[{tmp_path}/a.parquet,{tmp_path}/a.parquet]"}) == []


def test_the_function_of_a_reward_has_to_be_there(tmp_path: Path) -> None:
    file = tmp_path / "reward.py"
    path, name = "reward.custom_reward_function.path", "reward.custom_reward_function.name"
    file.write_text("def score(data_source, solution_str, ground_truth, extra_info=None):\n    return 0.0\n")
    assert codes({path: str(file), name: "score"}) == []
    assert codes({path: str(file), name: "scores"}) == ["reward_missing"]
    file.write_text("def score(:\n")
    assert codes({path: str(file), name: "score"}) == ["reward_missing"]


def test_credentials_that_are_there_are_enough(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    wandb = {"trainer.logger": "[console,wandb]"}
    monkeypatch.setenv("WANDB_MODE", "offline")
    assert codes(wandb) == []
    monkeypatch.delenv("WANDB_MODE")
    (tmp_path / ".netrc").write_text("machine api.wandb.ai login user password key\n")
    assert codes(wandb) == []


def test_a_rollout_apart_has_to_have_its_own_gpus_and_arithmetic() -> None:
    apart = {"trainer.v1.trainer_mode": "separate_async", f"{ROLLOUT}.nnodes": "1", f"{ROLLOUT}.n_gpus_per_node": "4"}
    sound = {**apart, f"{ROLLOUT}.checkpoint_engine.backend": "nccl", "data.train_batch_size": "128"}
    assert codes(sound) == []
    assert codes({**sound, "data.train_batch_size": "64"}) == ["separate_async"]
    assert codes({**sound, f"{ROLLOUT}.nnodes": "0"}) == ["separate_async"]
    assert codes({**sound, f"{ROLLOUT}.checkpoint_engine.backend": "naive"}) == ["separate_async"]


def test_all_that_is_wrong_is_told_in_the_order_in_which_it_is_written() -> None:
    wrong = {"trainer.total_epochs": "abc", "trainer.max_ckpt_to_keep": "1", "trainer.logger": "[wandb]"}
    assert codes(wrong) == ["credentials_missing", "wrong_type", "unknown_key"]


def test_a_setting_that_verl_resolves_itself_is_let_pass() -> None:
    assert codes({f"{ACTOR}.ppo_mini_batch_size": "${data.train_batch_size}"}) == []
    assert codes({"trainer.project_name": "${oc.env:USER}"}) == []


EXAMPLES = {
    "grpo on fsdp": """algorithm.adv_estimator=grpo data.train_batch_size=1024 data.max_prompt_length=512
        data.max_response_length=1024 data.filter_overlong_prompts=True actor_rollout_ref.model.path=/m/Qwen2-7B
        actor_rollout_ref.actor.optim.lr=1e-6 actor_rollout_ref.model.use_remove_padding=True
        actor_rollout_ref.actor.ppo_mini_batch_size=256 actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=40
        actor_rollout_ref.actor.use_kl_loss=True actor_rollout_ref.actor.kl_loss_coef=0.001
        actor_rollout_ref.actor.kl_loss_type=low_var_kl actor_rollout_ref.actor.entropy_coeff=0
        actor_rollout_ref.model.enable_gradient_checkpointing=True
        actor_rollout_ref.actor.fsdp_config.param_offload=False
        actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=40
        actor_rollout_ref.rollout.tensor_model_parallel_size=2 actor_rollout_ref.rollout.name=vllm
        actor_rollout_ref.rollout.gpu_memory_utilization=0.6 actor_rollout_ref.rollout.n=5
        actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu=40 trainer.critic_warmup=0
        trainer.n_gpus_per_node=8 trainer.nnodes=1 trainer.save_freq=20 trainer.test_freq=5
        trainer.total_epochs=15""",
    "ppo with a critic": """algorithm.adv_estimator=gae data.train_batch_size=1024 critic.model.path=/m/critic
        actor_rollout_ref.model.path=/m/actor actor_rollout_ref.actor.ppo_mini_batch_size=256
        actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=16 critic.ppo_micro_batch_size_per_gpu=32
        critic.optim.lr=1e-5 critic.model.use_remove_padding=True actor_rollout_ref.rollout.name=vllm
        actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=32 algorithm.use_kl_in_reward=False
        trainer.n_gpus_per_node=8 trainer.save_freq=20""",
    "dapo": """algorithm.adv_estimator=grpo algorithm.filter_groups.enable=True algorithm.filter_groups.metric=acc
        actor_rollout_ref.actor.clip_ratio_low=0.2 actor_rollout_ref.actor.clip_ratio_high=0.28
        actor_rollout_ref.actor.clip_ratio_c=10.0 actor_rollout_ref.actor.loss_agg_mode=token-mean
        reward.reward_manager.name=dapo +reward.reward_kwargs.overlong_buffer_cfg.enable=True
        actor_rollout_ref.actor.use_dynamic_bsz=True actor_rollout_ref.actor.ppo_max_token_len_per_gpu=22528
        data.train_batch_size=512 actor_rollout_ref.actor.ppo_mini_batch_size=32 actor_rollout_ref.rollout.n=16
        actor_rollout_ref.rollout.name=vllm trainer.save_freq=5""",
    "rloo": """algorithm.adv_estimator=rloo algorithm.use_kl_in_reward=True algorithm.kl_penalty=kl
        algorithm.kl_ctrl.kl_coef=0.001 actor_rollout_ref.rollout.n=5 actor_rollout_ref.rollout.name=sglang
        actor_rollout_ref.actor.use_dynamic_bsz=True trainer.save_freq=10""",
    "megatron": """model_engine=megatron algorithm.adv_estimator=grpo actor_rollout_ref.rollout.n=5
        actor_rollout_ref.actor.megatron.tensor_model_parallel_size=2
        actor_rollout_ref.actor.megatron.pipeline_model_parallel_size=2 actor_rollout_ref.rollout.name=vllm
        actor_rollout_ref.actor.use_dynamic_bsz=True trainer.save_freq=10""",
    "lora": """algorithm.adv_estimator=grpo actor_rollout_ref.model.lora_rank=64 actor_rollout_ref.model.lora_alpha=32
        actor_rollout_ref.model.target_modules=all-linear actor_rollout_ref.rollout.load_format=safetensors
        actor_rollout_ref.rollout.layered_summon=True actor_rollout_ref.rollout.n=5 actor_rollout_ref.rollout.name=vllm
        actor_rollout_ref.actor.use_dynamic_bsz=True trainer.save_freq=10""",
    "several turns with tools": """algorithm.adv_estimator=grpo actor_rollout_ref.rollout.name=sglang
        actor_rollout_ref.rollout.multi_turn.enable=True actor_rollout_ref.rollout.n=8
        actor_rollout_ref.rollout.multi_turn.max_assistant_turns=2 actor_rollout_ref.actor.use_dynamic_bsz=True
        trainer.save_freq=10""",
    "gspo": """algorithm.adv_estimator=grpo actor_rollout_ref.actor.policy_loss.loss_mode=gspo
        actor_rollout_ref.actor.loss_agg_mode=seq-mean-token-mean actor_rollout_ref.rollout.n=16
        actor_rollout_ref.actor.use_dynamic_bsz=True actor_rollout_ref.rollout.name=vllm trainer.save_freq=10""",
    "reinforce++": """algorithm.adv_estimator=reinforce_plus_plus algorithm.gamma=1.0
        actor_rollout_ref.rollout.name=vllm actor_rollout_ref.actor.use_dynamic_bsz=True trainer.save_freq=10""",
    "rollouts apart": """algorithm.adv_estimator=grpo trainer.v1.trainer_mode=separate_async
        data.train_batch_size=1024 actor_rollout_ref.actor.ppo_mini_batch_size=256 actor_rollout_ref.rollout.n=8
        actor_rollout_ref.rollout.nnodes=1 actor_rollout_ref.rollout.n_gpus_per_node=8
        actor_rollout_ref.hybrid_engine=False actor_rollout_ref.rollout.checkpoint_engine.backend=nccl
        actor_rollout_ref.rollout.name=vllm actor_rollout_ref.actor.use_dynamic_bsz=True trainer.save_freq=10""",
}


@pytest.mark.parametrize("name", EXAMPLES)
def test_nothing_is_wrong_with_how_people_train(name: str) -> None:
    assert [
        finding.what for finding in lint(of_overrides(EXAMPLES[name].split())) if finding.severity is Severity.ERROR
    ] == []


def test_each_code_is_found_by_some_test() -> None:
    text = Path(__file__).read_text()
    only_of_stages = {Code.DECIDED_BY_STAGE, Code.ROLLOUT_MISSING}
    missing = [code for code in Code if f"Code.{code.name}" not in text and f'"{code.value}"' not in text]
    assert set(missing) <= only_of_stages


def test_a_rollout_has_to_be_named() -> None:
    settings = {key: value for key, value in SOUND.items() if key != f"{ROLLOUT}.name"}
    found = lint(of_overrides([f"{key}={value}" for key, value in settings.items()]))
    assert [finding.code for finding in found] == [Code.ROLLOUT_MISSING]


def test_linting_imports_neither_verl_nor_torch_nor_ray() -> None:
    code = (
        "import sys\n"
        "from verl_workflow.verl_config import lint, of_overrides\n"
        "lint(of_overrides(['trainer.n_gpus_per_node=4']))\n"
        "assert not {'torch', 'verl', 'transformers', 'ray'} & set(sys.modules), sorted(sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_finding_is_plain_json() -> None:
    [finding] = found({"trainer.total_epochs": "abc"})
    shown: Any = finding.to_json()
    assert shown["code"] == "wrong_type"
    assert (shown["severity"], shown["key"], shown["value"]) == ("error", "trainer.total_epochs", "abc")


def test_the_page_of_codes_has_each_of_them() -> None:
    page = (Path(__file__).parents[2] / "docs/lint.md").read_text()
    told = [line.split("`")[1] for line in page.splitlines() if line.startswith("| `")]
    assert told == [code.value for code in Code]
