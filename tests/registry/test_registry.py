from __future__ import annotations

import multiprocessing
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from _registries import unchecked

from verl_workflow.artifacts import Artifact
from verl_workflow.errors import ErrorCode, UserError, VerlWorkflowError
from verl_workflow.registry import Lineage, Registry
from verl_workflow.storage import Store

MakeModel = Callable[[str], Artifact]
MakeLineage = Callable[..., Lineage]


def leftovers(root: Path) -> list[str]:
    return [path.name for path in root.rglob("*") if ".partial" in path.name]


def greedy(folder: Path) -> list[list[int]]:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    answers = []
    for question in ("say 3", "what is up", "1 + 1"):
        chat = [{"role": "user", "content": question}]
        ids = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)
        answers.append(model.generate(**ids, max_new_tokens=8, do_sample=False)[0].tolist())
    return answers


def test_a_version_has_its_own_files_that_answer_as_the_source_does(
    store: Store, tmp_path: Path, model: MakeModel, lineage: MakeLineage
) -> None:
    source = model("a")
    before = greedy(source.path)
    registry = Registry(store, tmp_path / "files")
    origin = lineage(pipeline="nightly", data={"train": "ab"}, parent="cd")
    version = registry.register("math", source, origin, {"candidate": {"score": 0.5}})
    for file in source.path.iterdir():
        file.write_bytes(b"changed later")

    found = Registry(Store(store.uri), tmp_path / "files").resolve("math", "v0001")
    assert found == version
    assert found.path == tmp_path / "files" / "registry" / "math" / "v0001"
    assert (found.artifact.sha256, found.artifact.bytes) == (source.sha256, source.bytes)
    assert found.files["README.md"].bytes == 1
    assert (found.lineage, found.evaluation) == (origin, {"candidate": {"score": 0.5}})
    registry.verify("math", "v0001")
    assert greedy(found.path) == before


def test_the_same_run_stage_and_content_is_one_version(
    registry: Registry, model: MakeModel, lineage: MakeLineage
) -> None:
    a, b = model("a"), model("b")
    first = registry.register("math", a, lineage("monday"))
    assert registry.register("math", a, lineage("monday", epoch=7, attempt=3)) == first
    assert registry.register("math", b, lineage("monday")).version == "v0002"
    assert registry.register("math", a, lineage("tuesday")).version == "v0003"
    assert [found.version for found in registry.versions("math")] == ["v0001", "v0002", "v0003"]
    assert registry.models() == ["math"]


def test_numbers_above_9999_keep_their_order(registry: Registry, model: MakeModel, lineage: MakeLineage) -> None:
    for version, run in (("v10000", "later"), ("v9999", "earlier")):
        registry._claim = lambda name, identity, version=version: version  # type: ignore[method-assign,misc]
        registry.register("math", model(run), lineage(run))
    assert [found.version for found in registry.versions("math")] == ["v9999", "v10000"]


@pytest.mark.parametrize("missing", ["config.json", "model.safetensors", "tokenizer.json"])
def test_a_model_that_is_not_whole_is_refused_and_leaves_nothing(
    registry: Registry, tmp_path: Path, model: MakeModel, lineage: MakeLineage, missing: str
) -> None:
    broken = model("broken")
    (broken.path / missing).unlink()
    with pytest.raises(UserError) as caught:
        registry.register("math", Artifact.of(broken.path), lineage())
    assert caught.value.code is ErrorCode.MODEL_INVALID
    assert registry.models() == []
    assert not (tmp_path / "files").exists()


def test_a_model_that_does_not_load_is_refused_and_uses_up_no_number(
    store: Store, tmp_path: Path, model: MakeModel, lineage: MakeLineage
) -> None:
    registry = Registry(store, tmp_path / "files")
    broken = model("broken")
    config = broken.path / "config.json"
    config.write_text(config.read_text().replace('"hidden_size": 64', '"hidden_size": 63'))
    with pytest.raises(UserError, match="cannot load the model"):
        registry.register("math", Artifact.of(broken.path), lineage())
    assert store.list("registry") == []
    assert list((tmp_path / "files" / "registry" / "math").iterdir()) == []
    assert registry.register("math", model("whole"), lineage()).version == "v0001"


def test_a_copy_that_answers_differently_is_refused(store: Store, model: MakeModel) -> None:
    """The default check compares answers, not files: swapped weights load as well as the right ones."""
    import torch
    from safetensors.torch import load_file, save_file

    from verl_workflow.registry._probe import check_copy

    source, copy = model("source"), model("copy")
    check_copy(source.path, copy.path)
    weights = load_file(copy.path / "model.safetensors")
    weights["lm_head.weight"] = torch.flip(weights["lm_head.weight"], (0,)).contiguous()
    save_file(weights, copy.path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(VerlWorkflowError, match="answers differently"):
        check_copy(source.path, copy.path)


def test_a_source_that_changed_since_it_was_recorded_is_refused(
    registry: Registry, tmp_path: Path, model: MakeModel, lineage: MakeLineage
) -> None:
    recorded = model("a")
    (recorded.path / "README.md").write_text("somebody was here")
    with pytest.raises(VerlWorkflowError, match="not those that were evaluated") as caught:
        registry.register("math", recorded, lineage())
    assert caught.value.code is ErrorCode.MODEL_INVALID
    assert (registry.models(), leftovers(tmp_path)) == ([], [])


@pytest.mark.parametrize(
    ("damage", "told"),
    [
        (lambda folder: (folder / "model.safetensors").unlink(), "model.safetensors is missing"),
        (lambda folder: (folder / "README.md").write_text("b"), "README.md has changed"),
        (lambda folder: (folder / "new").write_text(""), "new is too much"),
    ],
)
def test_verify_names_the_damaged_file_and_registering_again_puts_it_right(
    registry: Registry, tmp_path: Path, model: MakeModel, lineage: MakeLineage, damage: Callable[[Path], Any], told: str
) -> None:
    source = model("a")
    version = registry.register("math", source, lineage())
    damage(version.path)
    with pytest.raises(VerlWorkflowError, match=told) as caught:
        registry.verify("math", "v0001")
    assert caught.value.code is ErrorCode.MODEL_INVALID
    assert registry.register("math", source, lineage()) == version
    registry.verify("math", "v0001")
    assert leftovers(tmp_path) == []


class Interrupted(Exception):
    pass


class DyingStore(Store):
    """Dies at its n-th write, before or after the write has taken place."""

    def __init__(self, uri: str, at: int, after: bool) -> None:
        super().__init__(uri)
        self.left, self.after, self.died = at, after, False

    def create(self, key: str, data: bytes) -> bool:
        self.left -= 1
        if self.left == 0 and not self.after:
            self.died = True
            raise Interrupted(key)
        wrote = super().create(key, data)
        if self.left == 0:
            self.died = True
            raise Interrupted(key)
        return wrote


@pytest.mark.parametrize("after", [False, True])
def test_death_at_any_write_is_completed_by_the_retry_under_the_same_version(
    store: Store, tmp_path: Path, model: MakeModel, lineage: MakeLineage, after: bool
) -> None:
    root = tmp_path / "files"
    unchecked(store, root).register("math", model("champion"), lineage("sunday"))
    unchecked(store, root).set_alias("math", "champion", "v0001", None)
    at = 0
    while True:
        at += 1
        name = f"{'after' if after else 'before'}{at}"
        source, origin = model(name), lineage(name)
        dying = DyingStore(store.uri, at, after)
        number = at

        def promote(with_store: Store) -> None:
            registry = unchecked(with_store, root)
            version = registry.register("math", source, origin)  # noqa: B023
            current = registry.alias("math", "champion")
            assert current is not None
            if current.run != origin.run:  # noqa: B023
                registry.set_alias("math", "champion", version.version, number, run=origin.run)  # noqa: B023

        try:
            promote(dying)
        except Interrupted:
            promote(Store(store.uri))
        registry = unchecked(Store(store.uri), root)
        versions = registry.versions("math")
        assert [found.lineage.run for found in versions].count(name) == 1
        assert len(versions) == at + 1
        registry.verify("math", versions[-1].version)
        assert registry.resolve("math", "champion").lineage.run == name
        assert [move.number for move in registry.history("math", "champion")] == list(range(1, at + 2))
        assert leftovers(root) == []
        if not dying.died:
            break
    assert at == 4, "claim, manifest and alias are three writes"


def test_death_while_files_are_copied_leaves_no_version_and_is_swept_by_the_next_attempt(
    store: Store, tmp_path: Path, model: MakeModel, lineage: MakeLineage
) -> None:
    root = tmp_path / "files"
    process = multiprocessing.get_context("spawn").Process(
        target=_register_and_die, args=(store.uri, root, model("a"), lineage())
    )
    process.start()
    process.join()
    assert process.exitcode == 9
    assert len(leftovers(root)) == 1
    registry = unchecked(store, root)
    assert registry.models() == []
    assert registry.register("math", Artifact.of(tmp_path / "models" / "a"), lineage(attempt=2)).version == "v0001"
    assert leftovers(root) == []


def _register_and_die(uri: str, root: Path, source: Artifact, origin: Lineage) -> None:
    Registry(Store(uri), root, check=lambda source, copy: os._exit(9)).register("math", source, origin)


def test_registering_at_once_gives_each_run_a_version_and_each_repeat_the_same(
    store: Store, tmp_path: Path, model: MakeModel, lineage: MakeLineage
) -> None:
    sources = {run: model(run) for run in ("mon", "tue", "wed")}
    got: list[tuple[str, str]] = []

    def register(run: str) -> None:
        registry = unchecked(Store(store.uri), tmp_path / "files")
        got.append((run, registry.register("math", sources[run], lineage(run)).version))

    threads = [threading.Thread(target=register, args=(run,)) for run in sources for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(got) == 9
    assert len(set(got)) == 3
    assert {version for _, version in got} == {"v0001", "v0002", "v0003"}
    assert leftovers(tmp_path) == []


def test_unknown_names_are_told_with_the_nearest(registry: Registry, model: MakeModel, lineage: MakeLineage) -> None:
    with pytest.raises(UserError, match="There are: none"):
        registry.resolve("math", "champion")
    registry.register("math", model("a"), lineage())
    registry.set_alias("math", "champion", "v0001", None)
    calls: list[tuple[Callable[[], Any], str]] = [
        (lambda: registry.resolve("maht", "champion"), "Did you mean math?"),
        (lambda: registry.versions("maht"), "Did you mean math?"),
        (lambda: registry.resolve("math", "chamption"), "Did you mean champion?"),
        (lambda: registry.resolve("math", "v0002"), "Did you mean v0001?"),
        (lambda: registry.set_alias("math", "champion", "v0002", 1), "Did you mean v0001?"),
        (lambda: registry.rollback("math", "champoin"), "Did you mean champion?"),
        (lambda: registry.verify("math", "v0009"), "Did you mean v0001?"),
    ]
    for call, told in calls:
        with pytest.raises(UserError) as caught:
            call()
        assert caught.value.code is ErrorCode.MODEL_UNKNOWN
        assert told in str(caught.value)


@pytest.mark.parametrize("name", ["../escape", "a/b", "", ".", "a" * 65, "new\n"])
def test_names_that_would_leave_their_folder_are_refused(
    registry: Registry, tmp_path: Path, model: MakeModel, lineage: MakeLineage, name: str
) -> None:
    calls: list[Callable[[], Any]] = [
        lambda: registry.register(name, model("a"), lineage()),
        lambda: registry.resolve(name, "champion"),
        lambda: registry.alias("math", name),
    ]
    for call in calls:
        with pytest.raises(UserError, match="cannot be the name"):
            call()
    assert not (tmp_path / "files").exists()


def test_looking_at_an_empty_registry_writes_nothing(tmp_path: Path) -> None:
    registry = Registry(Store(str(tmp_path / "storage")), tmp_path / "storage")
    assert registry.models() == []
    assert registry.alias("math", "champion") is None
    assert registry.history("math", "champion") == []
    assert not (tmp_path / "storage").exists()
