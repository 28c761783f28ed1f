from __future__ import annotations

import json
from pathlib import Path

import pytest
from _runs import Invoke

SOUND = [
    "algorithm.adv_estimator=grpo",
    "actor_rollout_ref.rollout.n=5",
    "actor_rollout_ref.rollout.name=vllm",
    "actor_rollout_ref.actor.use_dynamic_bsz=True",
    "trainer.save_freq=10",
    "trainer.logger=[console,file]",
    "trainer.default_local_dir=/runs/n",
]


def test_sound_settings_pass(invoke: Invoke) -> None:
    shown = invoke("lint", *SOUND)
    assert (shown.exit_code, shown.stdout) == (0, "nothing is wrong\n")


def test_errors_fail_and_are_told_with_their_place(invoke: Invoke) -> None:
    shown = invoke("lint", *SOUND, "trainer.max_ckpt_to_keep=3")
    assert shown.exit_code == 2
    first, last = shown.stdout.splitlines()
    assert first.startswith("trainer.max_ckpt_to_keep=3: error unknown_key: verl has no setting")
    assert "Did you mean `trainer.max_actor_ckpt_to_keep`" in first
    assert last == "1 error, 0 warnings"


def test_warnings_fail_only_when_asked_to(invoke: Invoke) -> None:
    settings = [*SOUND, "trainer.default_local_dir=checkpoints"]
    assert invoke("lint", *settings).exit_code == 0
    assert invoke("lint", *settings, "--strict").exit_code == 2


def test_rows_can_be_told(invoke: Invoke) -> None:
    shown = invoke("lint", *SOUND, "--rows", "100")
    assert shown.exit_code == 2
    assert "too_few_rows" in shown.stdout


def test_a_file_and_overrides_over_it(invoke: Invoke, tmp_path: Path) -> None:
    file = tmp_path / "config.yaml"
    file.write_text("trainer:\n  total_epochs: abc\n")
    shown = invoke("lint", str(file), *SOUND)
    assert f"{file}:2:3: error wrong_type: `trainer.total_epochs` must be int" in shown.stdout


def test_one_document_for_programs(invoke: Invoke) -> None:
    shown = invoke("lint", *SOUND, "trainer.total_epochs=abc", "--json")
    assert shown.exit_code == 2
    found = json.loads(shown.stdout)
    assert (found["errors"], found["warnings"]) == (1, 0)
    assert found["findings"][0]["code"] == "wrong_type"


def test_a_pipelines_stages_are_linted_where_they_stand(
    invoke: Invoke, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("WANDB_API_KEY", "WANDB_MODE", "WANDB_DISABLED"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "reward.py").write_text(
        "def score(data_source, solution_str, ground_truth, extra_info=None): return 0\n"
    )
    file = tmp_path / "p.yaml"
    file.write_text(
        "version: 1\nname: p\nmodel: {builtin: tiny}\nstages:\n"
        "  prepare:\n    kind: data\n    source: {reasoning_gym: {dataset: chain_sum, size: 20}}\n    validation: 4\n"
        "  train:\n    kind: verl\n    train: ${prepare.train}\n    validation: ${prepare.validation}\n"
        "    reward: {function: 'reward.py:score'}\n    steps: 2\n    batch_size: 4\n    save_every: 1\n"
        "    overrides:\n      trainer.logger: [console, wandb]\n"
    )
    shown = invoke("lint", str(file))
    assert shown.exit_code == 0
    assert f"{file}:18:7: warning credentials_missing" in shown.stdout
    told = invoke("validate", str(file))
    assert told.exit_code == 0
    assert "warning: " in told.stderr
    assert "WANDB_API_KEY" in told.stderr
    file.write_text(file.read_text().replace("trainer.logger", "trainer.loger"))
    refused = invoke("lint", str(file))
    assert refused.exit_code == 2
    assert f"{file}:18:7" in refused.stderr


@pytest.mark.parametrize(
    ("word", "said"),
    [
        ("nowhere.yaml", "there is no such file"),
        (".", "this is no file"),
        ("a.b=[1", "no override that hydra can read"),
    ],
)
def test_bad_input_is_told_in_a_line(invoke: Invoke, word: str, said: str) -> None:
    shown = invoke("lint", word)
    assert shown.exit_code == 2
    assert said in shown.stderr
    assert "Traceback" not in shown.stderr
