from __future__ import annotations

from pathlib import Path

import pytest

from verl_workflow.errors import ErrorCode, UserError, UserErrors
from verl_workflow.verl_config import is_override, of_file, of_overrides


def test_values_are_read_as_hydra_reads_them() -> None:
    words = [
        "a.b=4",
        "+a.c=[1,x]",
        "++a.d={k: 1e-6}",
        "~a.e",
        "a.f='x y'",
        "a.g=null",
        "a.h=True",
        "a.i=${x.y}",
        "a.j=",
    ]
    settings = of_overrides(words)
    assert [(setting.key, setting.value) for setting in settings] == [
        ("a.b", 4),
        ("+a.c", [1, "x"]),
        ("++a.d", {"k": 1e-6}),
        ("~a.e", None),
        ("a.f", "x y"),
        ("a.g", None),
        ("a.h", True),
        ("a.i", "${x.y}"),
        ("a.j", ""),
    ]
    assert [setting.where for setting in settings] == words


def test_a_choice_of_a_group_is_known_as_one() -> None:
    [setting] = of_overrides(["actor@actor_rollout_ref.actor=megatron_actor"])
    assert setting.group


def test_all_that_cannot_be_read_is_told_at_once() -> None:
    with pytest.raises(UserErrors) as caught:
        of_overrides(["a.b=[1", "a.c=1,2", "a.d=4"])
    assert [error.value for error in caught.value.errors] == ["a.b=[1", "a.c=1,2"]
    assert "several trainings" in str(caught.value)


@pytest.mark.parametrize(
    ("word", "override"),
    [
        ("a.b=1", True),
        ("+a=1", True),
        ("~a.b", True),
        ("config.yaml", False),
        ("train.sh", False),
        ("./x=1.yaml", False),
    ],
)
def test_words_are_files_or_overrides(word: str, override: bool) -> None:
    assert is_override(word) is override


def test_a_yaml_file_may_be_nested_and_dotted(tmp_path: Path) -> None:
    file = tmp_path / "config.yaml"
    file.write_text("defaults:\n  - ppo_trainer\ntrainer:\n  nnodes: 2\n  logger: [console]\nactor.optim.lr: 1e-6\n")
    settings = of_file(file)
    assert [(setting.key, setting.value, setting.where) for setting in settings] == [
        ("trainer.nnodes", 2, f"{file}:4:3"),
        ("trainer.logger", ["console"], f"{file}:5:3"),
        ("actor.optim.lr", 1e-6, f"{file}:6:1"),
    ]


def test_a_scripts_overrides_are_found_with_their_lines(tmp_path: Path) -> None:
    file = tmp_path / "train.sh"
    file.write_text(
        "#!/bin/bash\n"
        "set -x\n"
        "export HYDRA_FULL_ERROR=1  # trainer.nnodes=9\n"
        "ARGS=(\n"
        "    trainer.nnodes=2\n"
        ")\n"
        "python3 -m verl.trainer.main_ppo \\\n"
        "    data.train_files=$HOME/train.parquet \\\n"
        '    trainer.logger=\'["console","wandb"]\' trainer.project_name="$NAME" \\\n'
        '    "${ARGS[@]}" $@\n'
    )
    settings = of_file(file)
    assert [(setting.key, setting.where) for setting in settings] == [
        ("trainer.nnodes", f"{file}:5"),
        ("data.train_files", f"{file}:8"),
        ("trainer.logger", f"{file}:9"),
        ("trainer.project_name", f"{file}:9"),
    ]
    assert settings[2].value == ["console", "wandb"]
    # What the shell puts in is not judged.
    assert "${" in settings[1].value


@pytest.mark.parametrize(
    ("name", "content", "code"),
    [
        ("a.sh", b"echo nothing\n", ErrorCode.USAGE_INVALID),
        ("b.sh", b"\xff\xfe\x00trainer", ErrorCode.SPEC_SYNTAX),
        ("c.yaml", b"a: [1\n", ErrorCode.SPEC_SYNTAX),
        ("d.yaml", b"- 1\n", ErrorCode.SPEC_INVALID),
        ("e.yaml", b"\xff\xfe\x00", ErrorCode.SPEC_SYNTAX),
    ],
)
def test_files_that_hold_no_settings_are_told(tmp_path: Path, name: str, content: bytes, code: ErrorCode) -> None:
    file = tmp_path / name
    file.write_bytes(content)
    with pytest.raises(UserError) as caught:
        of_file(file)
    assert caught.value.code is code
    assert name in caught.value.where


def test_a_script_that_is_not_there_is_told(tmp_path: Path) -> None:
    with pytest.raises(UserError) as caught:
        of_file(tmp_path / "x.sh")
    assert caught.value.code is ErrorCode.FILE_MISSING
