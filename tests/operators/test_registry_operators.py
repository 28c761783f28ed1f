from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from _models_made import MODEL, make_versions
from _task_context import Task, TaskStates, Ti
from airflow.sdk import Asset
from airflow.sdk.exceptions import AirflowFailException
from airflow.sdk.execution_time.context import OutletEventAccessors
from verl_airflow import _models
from verl_airflow.operators import VerlPromoteOperator, VerlRollbackOperator, model_asset


class _Task(Task):
    """A task whose context has the events of its outlets."""

    def run(self) -> Any:
        self.events = OutletEventAccessors()
        return self.make().execute({**self.context(), "outlet_events": self.events})


class _Dies(TaskStates):
    """The process ends after the move."""

    def delete(self, key: str) -> None:
        raise KeyboardInterrupt


def promote(storage: str, version: str, **options: Any) -> _Task:
    return _Task(
        lambda: VerlPromoteOperator(task_id="promote", model=MODEL, version=version, storage=storage, **options)
    )


def roll_back(storage: str, **options: Any) -> _Task:
    return _Task(lambda: VerlRollbackOperator(task_id="back", model=MODEL, storage=storage, **options))


def test_a_promotion_moves_the_alias_and_tells_the_asset(storage: str) -> None:
    registry = make_versions(storage, 2)
    work = promote(storage, "v0001")
    told = work.run()
    assert told == {
        "model": MODEL,
        "alias": "champion",
        "version": "v0001",
        "number": 3,
        "previous": "v0002",
        "moved": True,
    }
    assert registry.alias(MODEL, "champion").version == "v0001"  # type: ignore[union-attr]
    assert work.events[model_asset(MODEL)].extra == told


def test_a_promotion_is_made_once_however_often_it_is_tried(storage: str) -> None:
    registry = make_versions(storage, 2)
    work = promote(storage, "v0001")
    work.run()
    registry.set_alias(MODEL, "champion", "v0002", 3)
    assert work.next_try().run()["moved"] is False
    assert len(registry.history(MODEL, "champion")) == 4, "what came after the first try stays"


def test_a_promotion_of_what_is_promoted_moves_nothing(storage: str) -> None:
    registry = make_versions(storage, 2)
    assert promote(storage, "v0002").run()["moved"] is False
    assert len(registry.history(MODEL, "champion")) == 2


def test_an_alias_that_was_never_set_is_set(storage: str) -> None:
    make_versions(storage, 1)
    assert promote(storage, "v0001", alias="canary").run()["previous"] is None


def test_a_promotion_does_not_overwrite_what_it_did_not_expect(storage: str) -> None:
    registry = make_versions(storage, 2)
    with pytest.raises(AirflowFailException, match="champion is v0002, not v0001"):
        promote(storage, "v0001", expected="v0001").run()
    assert promote(storage, "v0001", expected="v0002").run()["moved"]
    assert len(registry.history(MODEL, "champion")) == 3


def test_a_version_that_is_not_there_ends_the_task(storage: str) -> None:
    make_versions(storage, 1)
    with pytest.raises(AirflowFailException, match="v0009"):
        promote(storage, "v0009").run()


def test_a_rollback_goes_one_version_back(storage: str) -> None:
    registry = make_versions(storage, 3)
    told = roll_back(storage, files="/not/mounted/here").run()
    assert (told["version"], told["previous"], told["moved"]) == ("v0002", "v0003", True)
    assert registry.history(MODEL, "champion")[-1].rollback


def test_a_rollback_whose_try_was_lost_after_the_move_is_not_made_twice(storage: str) -> None:
    registry = make_versions(storage, 3)
    work = roll_back(storage, files="/not/mounted/here")
    work.states = _Dies(work.states.values)
    with pytest.raises(KeyboardInterrupt):
        work.run()
    work.states = TaskStates(work.states.values)
    assert work.next_try().run()["moved"] is False
    assert registry.alias(MODEL, "champion").version == "v0002"  # type: ignore[union-attr]


def test_a_rollback_that_is_cleared_goes_back_once_more(storage: str) -> None:
    make_versions(storage, 3)
    work = roll_back(storage, files="/not/mounted/here")
    work.run()
    assert work.next_try().run()["version"] == "v0001"


def test_a_rollback_after_somebody_s_move_waits_for_a_decision(storage: str) -> None:
    registry = make_versions(storage, 3)
    work = roll_back(storage, files="/not/mounted/here")
    work.states.set("verl_workflow_alias_moves", 3)
    registry.set_alias(MODEL, "champion", "v0001", 3)
    with pytest.raises(AirflowFailException, match="moved meanwhile"):
        work.run()
    registry.set_alias(MODEL, "champion", "v0003", 4)
    assert work.next_try().run()["version"] == "v0001"


def test_files_that_are_damaged_keep_a_version_from_coming_back(storage: str, tmp_path: Path) -> None:
    registry = make_versions(storage, 2, files=tmp_path / "storage")
    (tmp_path / "storage/registry" / MODEL / "v0001/weights").write_bytes(b"other")
    with pytest.raises(AirflowFailException, match="damaged"):
        roll_back(storage).run()
    assert registry.alias(MODEL, "champion").version == "v0002"  # type: ignore[union-attr]


def test_the_asset_is_known_before_a_run_unless_the_model_is_a_template() -> None:
    operator = VerlPromoteOperator(task_id="promote", model=MODEL, version="v0001")
    assert operator.outlets == [model_asset(MODEL)]
    assert operator.outlets[0].name == f"verl-model://{MODEL}"
    assert VerlPromoteOperator(task_id="promote", model="{{ params.model }}", version="v0001").outlets == []
    mine = Asset("mine")
    assert VerlPromoteOperator(task_id="promote", model=MODEL, version="v0001", outlets=[mine]).outlets == [mine]


def test_another_task_may_promote_the_same_version_again(storage: str) -> None:
    make_versions(storage, 2)
    promote(storage, "v0001").run()
    other = promote(storage, "v0002")
    other.ti = Ti(task_id="other")
    other.run()
    third = promote(storage, "v0001")
    third.ti = Ti(task_id="third")
    assert third.run()["moved"] is True
    assert _models.moves_of(storage, MODEL, "champion") == 5
