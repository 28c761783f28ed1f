# ruff: noqa: E501  (messages stand whole, as they are read)
from __future__ import annotations

import hashlib
import shutil
from pathlib import Path

import pytest

from verl_workflow.code import CodeManifest, changed, load_function, manifest, snapshot
from verl_workflow.errors import ErrorCode, UserError, VerlWorkflowError
from verl_workflow.spec import DataStage, Pipeline, PythonStage, Reward, Source


def write(folder: Path, **files: str) -> None:
    for name, text in files.items():
        path = folder / (name.replace("__", "/") + ".py")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Code in several files: a reward, what it imports, and what it does not."""
    base = tmp_path / "project"
    base.mkdir()
    write(
        base,
        reward="import json\nimport near\nfrom package import deep\n\ndef score():\n    return near.value() + deep.VALUE\n",
        near="def value():\n    from late import VALUE\n    return VALUE\n",
        late="VALUE = 1\n",
        package__deep="from . import other\nfrom .sub.leaf import X\nVALUE = other.Y + X\n",
        package__other="Y = 10\n",
        package__sub__leaf="X = 100\n",
        unused="raise SystemExit\n",
        steps="def run(): return 'ran'\n",
    )
    (base / "package" / "__init__.py").write_text("")
    (base / "assets").mkdir()
    (base / "assets" / "words.txt").write_text("a b\n")
    (base / "assets" / ".hidden").write_text("x")
    (base / "assets" / "__pycache__").mkdir()
    (base / "assets" / "__pycache__" / "x.pyc").write_bytes(b"x")
    return base


@pytest.fixture
def pipeline() -> Pipeline:
    return Pipeline(
        name="p",
        code=["assets"],
        stages=[
            DataStage(name="d", source=Source(jsonl="x"), validation=1, reward=Reward(function="reward.py:score")),
            PythonStage(name="a", function="steps:run"),
            PythonStage(name="b", function="json:dumps"),
        ],
    )


FILES = {
    "assets/words.txt",
    "late.py",
    "near.py",
    "package/__init__.py",
    "package/deep.py",
    "package/other.py",
    "package/sub/leaf.py",
    "reward.py",
    "steps.py",
}


def test_code_is_what_functions_name_and_import_and_what_is_listed(folder: Path, pipeline: Pipeline) -> None:
    found = manifest(pipeline, folder)
    assert set(found.files) == FILES
    assert found.files["late.py"] == hashlib.sha256(b"VALUE = 1\n").hexdigest()


def test_the_digest_depends_on_content_and_names_only(folder: Path, pipeline: Pipeline, tmp_path: Path) -> None:
    first = manifest(pipeline, folder)
    lines = "".join(f"{name}\0{sha256}\n" for name, sha256 in sorted(first.files.items()))
    assert first.digest == hashlib.sha256(lines.encode()).hexdigest()
    moved = tmp_path / "elsewhere"
    folder.rename(moved)
    assert manifest(pipeline, moved) == first
    (moved / "unused.py").write_text("changed")
    assert manifest(pipeline, moved) == first
    (moved / "late.py").write_text("VALUE = 2\n")
    assert manifest(pipeline, moved).digest != first.digest


def test_the_snapshot_is_a_complete_copy_and_taken_once(folder: Path, pipeline: Pipeline, tmp_path: Path) -> None:
    target = tmp_path / "runs" / "r1" / "code"
    found = snapshot(pipeline, folder, target)
    assert found == manifest(pipeline, folder)
    assert {path.relative_to(target).as_posix() for path in target.rglob("*") if path.is_file()} == FILES
    assert snapshot(pipeline, folder, target) == found
    (folder / "late.py").write_text("VALUE = 2\n")
    with pytest.raises(VerlWorkflowError) as caught:
        snapshot(pipeline, folder, target)
    assert caught.value.code is ErrorCode.FILE_EXISTS
    assert (target / "late.py").read_text() == "VALUE = 1\n"
    assert [path.name for path in target.parent.iterdir()] == ["code"]


def test_a_snapshot_that_fails_leaves_nothing(folder: Path, pipeline: Pipeline, tmp_path: Path) -> None:
    (folder / "near.py").unlink()
    (folder / "reward.py").write_text("def f(:\n")
    with pytest.raises(UserError, match=r"reward\.py:1:7 is not valid Python"):
        snapshot(pipeline, folder, tmp_path / "code")
    assert not (tmp_path / "code").exists()


def test_a_copy_that_breaks_off_leaves_nothing(
    folder: Path, pipeline: Pipeline, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copied = []

    def copy(source: Path, target: Path) -> None:
        if len(copied) == 3:
            raise OSError("disk full")
        copied.append(target)
        target.write_bytes(source.read_bytes())

    monkeypatch.setattr("shutil.copyfile", copy)
    with pytest.raises(VerlWorkflowError, match="disk full") as caught:
        snapshot(pipeline, folder, tmp_path / "runs" / "code")
    assert caught.value.code is ErrorCode.STORAGE
    assert len(copied) == 3
    assert list((tmp_path / "runs").iterdir()) == []


def test_a_target_that_cannot_be_made_is_the_users_mistake(folder: Path, pipeline: Pipeline, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("not a folder")
    for target in (tmp_path / "file" / "code", tmp_path / "file" / "runs" / "code", Path("/proc/x/code")):
        with pytest.raises(UserError, match="the file system refuses this path") as caught:
            snapshot(pipeline, folder, target)
        assert caught.value.code is ErrorCode.STORAGE


def test_a_source_that_goes_away_is_not_taken_for_the_target(
    folder: Path, pipeline: Pipeline, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copy = shutil.copyfile

    def late(source: Path, target: Path) -> None:
        source.unlink()
        copy(source, target)

    monkeypatch.setattr("shutil.copyfile", late)
    with pytest.raises(FileNotFoundError):
        snapshot(pipeline, folder, tmp_path / "code")


def test_a_pipeline_without_code_has_an_empty_snapshot(folder: Path, tmp_path: Path) -> None:
    pipeline = Pipeline(name="p", stages=[PythonStage(name="b", function="json:dumps")])
    assert snapshot(pipeline, folder, tmp_path / "code").files == {}
    assert list((tmp_path / "code").iterdir()) == []


def test_links_are_followed_inside_and_refused_outside(folder: Path, pipeline: Pipeline, tmp_path: Path) -> None:
    (folder / "assets" / "inside.txt").symlink_to(folder / "unused.py")
    (folder / "assets" / "loop").symlink_to(folder / "assets")
    target = tmp_path / "code"
    assert "assets/inside.txt" in snapshot(pipeline, folder, target).files
    assert not (target / "assets" / "inside.txt").is_symlink()
    (tmp_path / "secret.txt").write_text("secret")
    (folder / "assets" / "out.txt").symlink_to(tmp_path / "secret.txt")
    with pytest.raises(UserError, match=r"lies in the folder of the pipeline file \(got 'assets/out.txt'\)"):
        manifest(pipeline, folder)
    (folder / "assets" / "out.txt").unlink()
    (folder / "assets" / "out").symlink_to(tmp_path)
    with pytest.raises(UserError, match="lies in the folder of the pipeline file"):
        manifest(pipeline, folder)


def test_an_imported_file_that_is_a_link_out_is_refused(folder: Path, pipeline: Pipeline, tmp_path: Path) -> None:
    (tmp_path / "late.py").write_text("VALUE = 1\n")
    (folder / "late.py").unlink()
    (folder / "late.py").symlink_to(tmp_path / "late.py")
    with pytest.raises(UserError, match=r"got 'late\.py'"):
        manifest(pipeline, folder)


def test_changes_are_told_by_name(folder: Path, pipeline: Pipeline) -> None:
    recorded = manifest(pipeline, folder)
    assert changed(recorded, folder) == []
    (folder / "unused.py").write_text("no matter")
    assert changed(recorded, folder) == []
    (folder / "near.py").write_text("import fresh\n")
    (folder / "fresh.py").write_text("")
    (folder / "assets" / "words.txt").unlink()
    again = CodeManifest(files=dict(recorded.files), digest=recorded.digest)
    assert changed(again, folder) == ["assets/words.txt missing", "fresh.py new", "near.py modified"]


def test_files_that_came_into_a_listed_folder_are_told_as_new(folder: Path, pipeline: Pipeline, tmp_path: Path) -> None:
    recorded = manifest(pipeline, folder)
    assert changed(recorded, folder, pipeline.code) == []
    (folder / "assets" / "more.txt").write_text("c\n")
    assert changed(recorded, folder, pipeline.code) == ["assets/more.txt new"]
    (folder / "assets" / "more.txt").unlink()
    (folder / "assets" / "out.txt").symlink_to(tmp_path / "elsewhere.txt")
    (tmp_path / "elsewhere.txt").write_text("d\n")
    assert changed(recorded, folder, pipeline.code) == ["assets modified"]
    (folder / "assets" / "out.txt").unlink()
    (folder / "assets" / "words.txt").unlink()
    (folder / "assets").rename(folder / "moved")
    assert changed(recorded, folder, pipeline.code) == ["assets/words.txt missing"]


def test_a_changed_file_that_is_no_python_any_more_is_told_as_changed(folder: Path, pipeline: Pipeline) -> None:
    recorded = manifest(pipeline, folder)
    (folder / "near.py").write_text("def f(:\n")
    assert changed(recorded, folder) == ["near.py modified"]


def test_a_function_loads_with_its_siblings(folder: Path) -> None:
    assert load_function("reward.py:score", folder)() == 1 + 110
    assert load_function("steps:run", folder)() == "ran"
    assert load_function("json:dumps", folder)([1]) == "[1]"


def test_a_file_in_a_folder_finds_its_neighbours(folder: Path) -> None:
    write(
        folder,
        rewards__main="import beside, late\ndef f(): return beside.NAME, late.VALUE\n",
        rewards__beside="NAME = 'b'\n",
    )
    pipeline = Pipeline(name="p", stages=[PythonStage(name="a", function="rewards/main.py:f")])
    assert set(manifest(pipeline, folder).files) == {"late.py", "rewards/beside.py", "rewards/main.py"}
    assert load_function("rewards/main.py:f", folder)() == ("b", 1)


def test_siblings_of_one_folder_are_not_taken_for_those_of_another(folder: Path, tmp_path: Path) -> None:
    first = load_function("reward.py:score", folder)
    other = tmp_path / "other"
    write(other, reward="import near\ndef score(): return near.NAME\n", near="NAME = 'other'\n")
    assert load_function("reward.py:score", other)() == "other"
    assert load_function("reward.py:score", folder)() == 111
    assert first() == 111


def test_a_file_saved_again_is_loaded_anew(folder: Path) -> None:
    assert load_function("steps.py:run", folder)() == "ran"
    (folder / "steps.py").write_text("def run(): return 'new'\n")
    assert load_function("steps.py:run", folder)() == "new"


@pytest.mark.parametrize(
    ("ref", "code", "message"),
    [
        ("missing.py:f", ErrorCode.FILE_MISSING, r"there is no missing\.py"),
        ("../x.py:f", ErrorCode.REWARD_INVALID, "lies in the folder"),
        ("broken.py:f", ErrorCode.REWARD_INVALID, r"broken\.py cannot be imported: SyntaxError"),
        (
            "raises.py:f",
            ErrorCode.REWARD_INVALID,
            r"raises\.py cannot be imported: ZeroDivisionError: division by zero",
        ),
        ("exits.py:f", ErrorCode.REWARD_INVALID, r"exits\.py cannot be imported: SystemExit: 3"),
        (
            "needs.py:f",
            ErrorCode.REWARD_INVALID,
            r"ModuleNotFoundError.*Install absent_thing, or put absent_thing\.py beside",
        ),
        ("absent_thing:f", ErrorCode.REWARD_INVALID, "absent_thing cannot be imported"),
        ("steps.py:nothing", ErrorCode.REWARD_INVALID, r"steps\.py has no function nothing. Define `def nothing"),
        ("late.py:VALUE", ErrorCode.REWARD_INVALID, r"VALUE in late\.py cannot be called \(got 1\)"),
    ],
)
def test_a_function_that_does_not_load_is_told_with_its_cause(
    folder: Path, ref: str, code: ErrorCode, message: str
) -> None:
    write(
        folder, broken="def f(:\n", raises="1 / 0\n", exits="import sys\nsys.exit(3)\n", needs="import absent_thing\n"
    )
    with pytest.raises(UserError, match=message) as caught:
        load_function(ref, folder, error_code=ErrorCode.REWARD_INVALID)
    assert caught.value.code is code
    if "cannot be imported" in message:
        assert caught.value.__cause__ is not None
