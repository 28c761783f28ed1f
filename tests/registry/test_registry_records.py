from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from _registries import unchecked

from verl_workflow.artifacts import Artifact
from verl_workflow.errors import ErrorCode, VerlWorkflowError
from verl_workflow.registry import Lineage, Registry
from verl_workflow.storage import Store

MANIFEST = "registry/demo/versions/v0001.json"
MOVE = "registry/demo/aliases/champion/000000000001.json"


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(str(tmp_path / "storage"))


@pytest.fixture
def filled(store: Store, tmp_path: Path, model: Callable[[str], Artifact], lineage: Callable[..., Lineage]) -> Registry:
    registry = unchecked(store, tmp_path / "files")
    registry.register("demo", model("a"), lineage(data={"train": "0"}))
    registry.set_alias("demo", "champion", "v0001", None)
    return registry


def refused(call: Callable[[], Any], key: str) -> None:
    with pytest.raises(VerlWorkflowError, match=key) as caught:
        call()
    assert caught.value.code is ErrorCode.STORAGE


def change(store: Store, key: str, fields: dict[str, Any]) -> None:
    store.put(key, json.dumps({**json.loads(store.get(key) or b""), **fields}).encode())


@pytest.mark.parametrize("data", [b"", b"[]", b'{"format": 1}', b'{"format": 2}', b"\xff", b"[" * 100_000])
def test_a_record_that_is_none_is_named(store: Store, filled: Registry, data: bytes) -> None:
    for key in (MANIFEST, MOVE):
        store.put(key, data)
    refused(lambda: filled.versions("demo"), MANIFEST)
    refused(lambda: filled.alias("demo", "champion"), MOVE)
    assert (filled.models(), filled.version_names("demo")) == (["demo"], ["v0001"])
    assert filled.alias_names("demo") == ["champion"]


@pytest.mark.parametrize(
    "fields",
    [
        {"artifact": {}},
        {"artifact": 5},
        {"files": []},
        {"files": {"a": None}},
        {"files": {"a": {"sha256": 1, "bytes": 1}}},
        {"lineage": {"run": 5, "stage": "x"}},
        {"lineage": {"run": "r", "stage": "x", "data": {"train": 5}}},
        {"evaluation": None},
        {"created_at": 1},
        {"version": "v0002"},
        {"model": "other"},
    ],
)
def test_a_manifest_with_a_field_of_another_kind_is_named(
    store: Store, filled: Registry, fields: dict[str, Any]
) -> None:
    change(store, MANIFEST, fields)
    refused(lambda: filled.resolve("demo", "v0001"), MANIFEST)


@pytest.mark.parametrize(
    "fields", [{"version": "../../x"}, {"version": 1}, {"number": True}, {"number": 2}, {"token": None}, {"run": 5}]
)
def test_a_move_with_a_field_of_another_kind_is_named(store: Store, filled: Registry, fields: dict[str, Any]) -> None:
    change(store, MOVE, fields)
    refused(lambda: filled.alias("demo", "champion"), MOVE)


def test_what_others_put_beside_the_records_is_none_of_them(store: Store, filled: Registry) -> None:
    for key in (
        "aliases/champion/²",
        "aliases/champion/7.json",
        "aliases/a b/000000000001.json",
        "versions/notes",
        "versions/v0007",
        "claims/notes",
    ):
        store.put(f"registry/demo/{key}", b"x")
    store.put("registry/a b/versions/v0001.json", b"x")
    assert filled.models() == ["demo"]
    assert [version.version for version in filled.versions("demo")] == ["v0001"]
    assert [move.version for move in filled.history("demo", "champion")] == ["v0001"]
    assert list(filled.aliases("demo")) == ["champion"]
