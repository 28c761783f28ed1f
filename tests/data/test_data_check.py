"""Mistakes in data files, told before anything runs."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from verl_workflow.data import check_data_stage, training_rows
from verl_workflow.spec import DataStage

CHAT = [{"role": "user", "content": "1 + 1"}]
Told = Callable[..., list[str]]


def rows(count: int, **more: Any) -> list[dict[str, Any]]:
    return [{"question": f"{number} + 1", "answer": "2", **more} for number in range(count)]


@pytest.fixture
def told(tmp_path: Path) -> Told:
    def check(**fields: Any) -> list[str]:
        errors = check_data_stage(stage(**fields), tmp_path, where=lambda path: "p.yaml:" + ".".join(path))
        return [str(error).replace(f"{tmp_path}/", "") for error in errors]

    return check


def stage(**fields: Any) -> DataStage:
    return DataStage(**{"name": "d", "validation": 2, "prompt": "{{ question }}", "answer": "answer", **fields})


def write(path: Path, rows: list[dict[str, Any]]) -> None:
    if path.suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist(rows), path)
    else:
        path.write_text("\n".join(json.dumps(row) for row in rows) + "\n")


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.parquet"])
def test_good_files_are_passed(told: Told, tmp_path: Path, name: str) -> None:
    write(tmp_path / name, rows(5))
    source = {name.rpartition(".")[2]: name}
    assert told(source=source) == []
    assert training_rows(stage(source=source), tmp_path) == 3


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.parquet"])
def test_a_text_where_a_chat_belongs_is_told_with_file_and_row(told: Told, tmp_path: Path, name: str) -> None:
    write(tmp_path / name, [{"prompt": "1 + 1", "answer": "2"}] * 5)
    (message,) = told(source={name.rpartition(".")[2]: name}, prompt=None)
    assert message.startswith(f"{name}:1: ")
    assert "max_rejected" in message


def test_rows_that_may_be_rejected_are_left_to_the_stage(told: Told, tmp_path: Path) -> None:
    write(tmp_path / "rows.jsonl", [{"prompt": "1 + 1", "answer": "2"}, *rows(4, prompt=CHAT)])
    assert told(source={"jsonl": "rows.jsonl"}, prompt=None, max_rejected=0.5) == []


def test_a_damaged_file_is_told_whatever_may_be_rejected(told: Told, tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text('{"question": "1", "answer": "2"}\n{"question": \n')
    (message,) = told(source={"jsonl": "rows.jsonl"}, max_rejected=1, validation={"jsonl": "rows.jsonl"})[:1]
    assert message.startswith("rows.jsonl:2: the line is not JSON")
    (tmp_path / "cut.parquet").write_bytes(b"PAR1 and no more")
    assert "cannot be read" in told(source={"parquet": "cut.parquet"})[0]


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.parquet"])
def test_too_few_rows_to_hold_out_are_told(told: Told, tmp_path: Path, name: str) -> None:
    write(tmp_path / name, rows(5))
    (message,) = told(source={name.rpartition(".")[2]: name}, validation=5)
    assert message == (
        "p.yaml:validation: the source has 5 rows, too few to hold out 5 and train on the rest (got 5). "
        "Give more rows, or hold out fewer."
    )


def test_a_file_that_a_stage_will_write_is_not_looked_for(told: Told, tmp_path: Path) -> None:
    source = {"jsonl": "${questions.file}"}
    assert told(source=source) == []
    assert training_rows(stage(source=source), tmp_path) is None


def test_a_generator_makes_as_many_rows_as_it_is_asked_for(tmp_path: Path) -> None:
    assert training_rows(stage(source={"reasoning_gym": {"dataset": "chain_sum", "size": 9}}), tmp_path) == 7
