"""Aliases: moved by one of all who race for it, rolled back, and never by a driver that was taken over."""

from __future__ import annotations

import multiprocessing
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from _registries import unchecked

from verl_workflow.artifacts import Artifact
from verl_workflow.errors import ErrorCode, FencedError, UserError, VerlWorkflowError
from verl_workflow.registry import Lineage, Registry
from verl_workflow.storage import Store

MakeModel = Callable[[str], Artifact]
MakeLineage = Callable[..., Lineage]


def test_an_alias_moves_only_from_where_it_was_seen(registry: Registry, model: MakeModel, lineage: MakeLineage) -> None:
    registry.register("math", model("a"), lineage("monday"))
    registry.register("math", model("b"), lineage("tuesday"))
    assert registry.alias("math", "champion") is None
    registry.set_alias("math", "champion", "v0001", None, run="monday", stage="promote", epoch=1)
    for expected in (None, 2, 5):
        with pytest.raises(VerlWorkflowError) as caught:
            registry.set_alias("math", "champion", "v0002", expected)
        assert caught.value.code is ErrorCode.REGISTRY_CONFLICT
    assert registry.resolve("math", "champion").version == "v0001"
    registry.set_alias("math", "champion", "v0002", 1, run="tuesday", epoch=2)
    assert registry.resolve("math", "champion").version == "v0002"
    moves = registry.history("math", "champion")
    assert [(m.number, m.version, m.run, m.epoch) for m in moves] == [
        (1, "v0001", "monday", 1),
        (2, "v0002", "tuesday", 2),
    ]
    assert {name: move.version for name, move in registry.aliases("math").items()} == {"champion": "v0002"}


def test_a_driver_that_was_taken_over_does_not_move_an_alias_back(
    registry: Registry, model: MakeModel, lineage: MakeLineage
) -> None:
    registry.register("math", model("a"), lineage("monday"))
    registry.set_alias("math", "champion", "v0001", None, run="monday", epoch=2)
    with pytest.raises(FencedError):
        registry.set_alias("math", "champion", "v0001", 1, run="monday", epoch=1)


def _race(uri: str, root: Path, version: str, barrier: Any, wins: Any) -> None:
    registry = unchecked(Store(uri), root)
    for number in range(5):
        barrier.wait()
        try:
            registry.set_alias("math", "champion", version, number or None)
            wins.put((number + 1, version))
        except VerlWorkflowError as error:
            assert error.code is ErrorCode.REGISTRY_CONFLICT
        # All have tried before the first one looks at the next.
        barrier.wait()


@pytest.mark.parametrize("kind", ["threads", "processes"])
def test_of_racing_moves_one_wins_each_number(
    store: Store, tmp_path: Path, model: MakeModel, lineage: MakeLineage, kind: str
) -> None:
    racers, root = 4, tmp_path / "files"
    names = [
        unchecked(store, root).register("math", model(str(number)), lineage(str(number))).version
        for number in range(racers)
    ]
    context = multiprocessing.get_context("spawn")
    barrier, wins = context.Barrier(racers), context.Queue()
    workers: list[Any] = [
        (threading.Thread if kind == "threads" else context.Process)(  # type: ignore[attr-defined]
            target=_race, args=(store.uri, root, name, barrier, wins)
        )
        for name in names
    ]
    for worker in workers:
        worker.start()
    won = dict(wins.get(timeout=120) for _ in range(5))
    for worker in workers:
        worker.join()
    assert wins.empty()
    assert {m.number: m.version for m in unchecked(store, root).history("math", "champion")} == won
    assert sorted(won) == [1, 2, 3, 4, 5]


def test_a_move_whose_answer_was_lost_is_known_as_its_own(
    registry: Registry, model: MakeModel, lineage: MakeLineage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Object stores repeat a request whose answer did not arrive; the second one finds the first one's record."""
    create = Store.create
    monkeypatch.setattr(Store, "create", lambda self, key, data: create(self, key, data) and create(self, key, data))
    assert registry.register("math", model("a"), lineage()).version == "v0001"
    registry.set_alias("math", "champion", "v0001", None)
    assert [move.number for move in registry.history("math", "champion")] == [1]


def test_rolling_back_goes_back_step_by_step_and_never_forth(
    registry: Registry, model: MakeModel, lineage: MakeLineage
) -> None:
    for number, name in enumerate(("a", "b", "c")):
        version = registry.register("math", model(name), lineage(name)).version
        registry.set_alias("math", "champion", version, number or None)
    assert registry.rollback("math", "champion").version == "v0002"
    assert registry.rollback("math", "champion").version == "v0001"
    with pytest.raises(UserError, match="no version before v0001"):
        registry.rollback("math", "champion")
    assert registry.rollback("math", "champion", to="v0003").version == "v0003"
    moves = registry.history("math", "champion")
    assert [(move.number, move.version, move.rollback) for move in moves] == [
        (1, "v0001", False),
        (2, "v0002", False),
        (3, "v0003", False),
        (4, "v0002", True),
        (5, "v0001", True),
        (6, "v0003", True),
    ]


def test_rolling_back_to_a_damaged_version_changes_nothing(
    registry: Registry, model: MakeModel, lineage: MakeLineage
) -> None:
    for number, name in enumerate(("a", "b")):
        version = registry.register("math", model(name), lineage(name))
        registry.set_alias("math", "champion", version.version, number or None)
    (registry.resolve("math", "v0001").path / "config.json").unlink()
    with pytest.raises(VerlWorkflowError, match=r"config\.json is missing"):
        registry.rollback("math", "champion")
    assert registry.resolve("math", "champion").version == "v0002"


def test_an_alias_named_like_a_version_is_refused(registry: Registry, model: MakeModel, lineage: MakeLineage) -> None:
    registry.register("math", model("a"), lineage())
    with pytest.raises(UserError, match="named like a version"):
        registry.set_alias("math", "v0001", "v0001", None)
