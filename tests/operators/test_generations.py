from __future__ import annotations

import re
from dataclasses import replace

import pytest
from _task_context import TaskStates
from verl_airflow._generations import RunRecord, TaskIdentity, current_generation, next_generation

IDENTITY = TaskIdentity(dag_id="nightly", run_id="manual__2026-12-01T00:00:00+00:00", task_id="train")


def test_each_generation_has_an_id_that_was_never_given() -> None:
    states = TaskStates()
    ids = [next_generation(states, IDENTITY, try_number=1).job_id for _ in range(3)]
    assert ids == [f"{IDENTITY.name}-g{number}" for number in (1, 2, 3)]


def test_the_newest_generation_is_on_record() -> None:
    states = TaskStates()
    assert current_generation(states) is None
    assert next_generation(states, IDENTITY, try_number=2) == current_generation(states)


@pytest.mark.parametrize(
    "other",
    [
        {"dag_id": "nightly2"},
        {"run_id": "manual__2026-12-01T00:00:00-00:00"},
        {"task_id": "train.1"},
        {"map_index": 0},
    ],
)
def test_no_other_task_has_the_name(other: dict[str, str]) -> None:
    assert replace(IDENTITY, **other).name != IDENTITY.name  # type: ignore[arg-type]


@pytest.mark.parametrize("dag_id", ["größe/.. ", "x" * 250, "a b"])
def test_a_name_can_be_a_folder_and_a_part_of_an_address(dag_id: str) -> None:
    name = replace(IDENTITY, dag_id=dag_id).name
    assert re.fullmatch(r"[A-Za-z0-9_-]{1,190}", name)


def test_runs_are_numbered_from_the_second_on() -> None:
    assert [RunRecord(number=number).run_id("night") for number in (1, 2, 3)] == ["night", "night.2", "night.3"]
