from __future__ import annotations

import errno
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from _training_pieces import checkpoint, failure, launched, stage

from verl_workflow.artifacts import Artifact
from verl_workflow.errors import ErrorCode, UserError
from verl_workflow.pipeline import define, plan, start
from verl_workflow.pipeline._compile import compile_plan
from verl_workflow.spec import Model, Pipeline, VerlStage, resolve
from verl_workflow.spec._stage import Member
from verl_workflow.storage import Store
from verl_workflow.training import _extend
from verl_workflow.training._checkpoints import checkpoints, fault, newest_valid, quarantine, write_manifest
from verl_workflow.training._extend import extended, go_on, origin
from verl_workflow.training._identity import bind
from verl_workflow.workflow import Driver, InlineLauncher, Plan, Step, create_run

ACTOR = ("actor",)
IDENTITY = {
    "algorithm": "grpo",
    "model": "a" * 64,
    "train": "t",
    "validation": "v",
    "world_size": 1,
    "data.shuffle": True,
}


def verl(**changes: Any) -> VerlStage:
    return stage(**{"steps": 10, "extends": "night-1", **changes})


@pytest.fixture
def storage(tmp_path: Path) -> Path:
    return tmp_path / "storage"


@pytest.fixture
def finished(storage: Path, tmp_path: Path) -> Callable[..., Path]:
    """A run in the storage whose training ended at step 6; gives the folder of its checkpoints."""

    def make(run_id: str = "night-1", *, fails: bool = False, changed: bool = False, **changes: Any) -> Path:
        spec = stage(**changes)
        store = Store(str(storage))
        create_run(store, run_id, {"pipeline": {"name": "p", "stages": [spec.model_dump(mode="json")]}})
        folder = storage / "runs" / run_id / "stages" / spec.name / "checkpoints"
        for step in (4, 6):
            write_manifest(checkpoint(folder, step), identity=IDENTITY, roles=ACTOR)
        bind(folder, IDENTITY)
        files = tmp_path / run_id
        files.mkdir()
        value: dict[str, Any] = {"checkpoint": {"path": str(folder / "global_step_6"), "step": 6}}
        for name in ("model", "metrics"):
            (files / name).write_text(f"{name} of {run_id}, {changed}")
            value[name] = Artifact.of(files / name).to_json()

        def call(_: Any) -> Any:
            if fails:
                raise UserError(ErrorCode.DATA_INVALID, "no rows")
            return value

        plan = Plan(steps=(Step(name=spec.name, call=call),))
        Driver(store=store, run_id=run_id, plan=plan, launcher=InlineLauncher()).run()
        return folder

    return make


@pytest.fixture
def into(tmp_path: Path) -> Path:
    folder = tmp_path / "into"
    folder.mkdir()
    return folder


def contents(folder: Path) -> dict[str, tuple[int, bytes]]:
    return {
        str(path.relative_to(folder)): (path.stat().st_mtime_ns, path.read_bytes())
        for path in folder.rglob("*")
        if path.is_file()
    }


def test_the_last_checkpoint_is_taken_over_and_the_earlier_run_left_as_it_is(
    finished: Callable[..., Path], storage: Path, into: Path
) -> None:
    source = finished()
    before = contents(source)
    go_on(verl(), str(storage), into, IDENTITY, ACTOR)
    (taken,) = checkpoints(into)
    assert (taken.step, fault(taken, world_size=1, roles=ACTOR, identity=IDENTITY)) == (6, None)
    assert origin(into) == {"run": "night-1", "stage": "train", "step": 6}
    assert (into / "global_step_6/data.pt").samefile(source / "global_step_6/data.pt")
    # What happens to it here happens to a name of its own.
    quarantine(taken)
    checkpoint(into, 6)
    write_manifest(into / "global_step_6", identity=IDENTITY, roles=ACTOR)
    assert contents(source) == before


def test_where_files_cannot_be_linked_they_are_copied(
    finished: Callable[..., Path], storage: Path, into: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = finished()

    def refuses(*_: Any) -> None:
        raise OSError(errno.EXDEV, "another file system")

    monkeypatch.setattr(os, "link", refuses)
    go_on(verl(), str(storage), into, IDENTITY, ACTOR)
    copied, original = (folder / "global_step_6/data.pt" for folder in (into, source))
    assert copied.read_bytes() == original.read_bytes()
    assert not copied.samefile(original)


def test_a_copy_that_fails_leaves_no_checkpoint(
    finished: Callable[..., Path], storage: Path, into: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    finished()

    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "no space left on device")

    monkeypatch.setattr(os, "link", full)
    error = failure(go_on, verl(), str(storage), into, IDENTITY, ACTOR)
    assert (error.code, error.retryable) == (ErrorCode.STORAGE, True)
    assert list(into.iterdir()) == []


def test_a_later_attempt_goes_on_from_its_own_checkpoints_without_the_earlier_run(
    finished: Callable[..., Path], storage: Path, into: Path
) -> None:
    finished()
    go_on(verl(), str(storage), into, IDENTITY, ACTOR)
    write_manifest(checkpoint(into, 8), identity=IDENTITY, roles=ACTOR)
    for each in checkpoints(into)[:1]:
        quarantine(each)
    go_on(verl(extends="deleted-since"), str(storage), into, IDENTITY, ACTOR)
    assert [each.step for each in checkpoints(into)] == [8]


def test_a_later_attempt_that_has_none_left_takes_it_over_again(
    finished: Callable[..., Path], storage: Path, into: Path
) -> None:
    finished()
    go_on(verl(), str(storage), into, IDENTITY, ACTOR)
    quarantine(checkpoints(into)[0])
    (into / "global_step_6/actor").mkdir(parents=True)
    go_on(verl(), str(storage), into, IDENTITY, ACTOR)
    newest = newest_valid(into, world_size=1, roles=ACTOR)
    assert newest is not None
    assert newest.step == 6


@pytest.mark.parametrize(
    ("changes", "code", "where", "said"),
    [
        ({"extends": "night-2"}, ErrorCode.RUN_UNKNOWN, "train.extends", "Did you mean night-1?"),
        ({"extends": "night-1/tain"}, ErrorCode.SPEC_INVALID, "train.extends", "It has: train."),
        ({"name": "other"}, ErrorCode.SPEC_INVALID, "other.extends", "Name one: extends: night-1/STAGE."),
        ({"steps": 6}, ErrorCode.SPEC_INVALID, "train.steps", "Set steps above 6"),
        ({"batch_size": 16}, ErrorCode.SPEC_INVALID, "train.batch_size", "Set batch_size to 8"),
        ({"seed": 2}, ErrorCode.SPEC_INVALID, "train.seed", "another order"),
    ],
)
def test_what_cannot_be_extended_is_refused_before_anything_runs(
    finished: Callable[..., Path], storage: Path, changes: dict[str, Any], code: ErrorCode, where: str, said: str
) -> None:
    finished()
    error = failure(extended, verl(**changes), str(storage))
    assert isinstance(error, UserError)
    assert (error.code, error.where) == (code, where)
    assert said in str(error)


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("model", "b" * 64, "trained with another model"),
        ("train", "x", "trained with another train"),
        ("validation", "x", "trained with another validation"),
        ("world_size", 8, "trained with another world size: 1, not 8"),
        ("algorithm", "ppo", "trained with another algorithm: grpo, not ppo"),
        ("data.shuffle", False, "trained with another data.shuffle: True, not False"),
    ],
)
def test_another_model_other_data_or_another_world_size_are_refused(
    finished: Callable[..., Path], storage: Path, into: Path, name: str, value: Any, said: str
) -> None:
    finished()
    error = failure(go_on, verl(), str(storage), into, {**IDENTITY, name: value}, ACTOR)
    assert isinstance(error, UserError)
    assert error.code is ErrorCode.CHECKPOINT_INVALID
    assert said in str(error)
    assert list(into.iterdir()) == []


def test_a_checkpoint_that_is_not_whole_any_more_is_refused(
    finished: Callable[..., Path], storage: Path, into: Path
) -> None:
    source = finished()
    (source / "global_step_6/data.pt").unlink()
    error = failure(go_on, verl(), str(storage), into, IDENTITY, ACTOR)
    assert error.code is ErrorCode.CHECKPOINT_INVALID
    assert "cannot be resumed from: data.pt is missing" in str(error)


def test_a_training_that_has_failed_is_refused_with_the_way_to_finish_it(
    finished: Callable[..., Path], storage: Path
) -> None:
    finished(fails=True)
    error = failure(extended, verl(), str(storage))
    assert "only a finished training can be extended, and train of night-1 is failed" in str(error)
    assert "verl-workflow resume night-1" in error.remedy


def test_a_stage_of_another_name_can_be_named(finished: Callable[..., Path], storage: Path) -> None:
    finished(name="train-2")
    found = extended(verl(extends="night-1/train-2"), str(storage))
    assert found is not None
    assert (found.stage, found.step) == ("train-2", 6)


def test_a_member_extends_the_one_of_its_own_combination(finished: Callable[..., Path], storage: Path) -> None:
    finished(name="train-2", member=Member(of="train", values={"x": 5}))
    found = extended(verl(name="train-1", member=Member(of="train", values={"x": 5})), str(storage))
    assert found is not None
    assert found.stage == "train-2"
    error = failure(extended, verl(name="train-2", member=Member(of="train", values={"x": 6})), str(storage))
    assert "the run night-1 has no member with {'x': 6}" in str(error)


@pytest.mark.parametrize("nothing", [None, ""])
def test_to_extend_nothing_is_to_start_from_the_model(storage: Path, into: Path, nothing: str | None) -> None:
    assert extended(verl(extends=nothing), str(storage)) is None
    go_on(verl(extends=nothing), str(storage), into, IDENTITY, ACTOR)
    assert origin(into) is None


@pytest.fixture
def extending(tmp_path: Path) -> Callable[[str], Any]:
    """A pipeline whose training extends a run."""
    (tmp_path / "reward.py").write_text("def score(data_source, solution_str, ground_truth, extra_info=None): ...\n")
    for name in ("train", "validation"):
        (tmp_path / f"{name}.parquet").write_text(name)

    def make(run_id: str) -> Any:
        return resolve(
            Pipeline(name="p", model=Model(builtin="tiny"), stages=[verl(extends=run_id, device="cpu")]), tmp_path
        )

    return make


def test_a_run_that_could_not_extend_is_not_started(extending: Callable[[str], Any], storage: Path) -> None:
    definition = define(extending("nobody"), run_id="more", storage=str(storage))
    with pytest.raises(UserError, match="there is no run of this id to extend"):
        start(definition)
    assert not storage.exists()
    (problem,) = plan(extending("nobody"), storage=str(storage)).problems
    assert problem.code is ErrorCode.RUN_UNKNOWN


def test_a_key_follows_what_is_extended_and_not_its_name(
    finished: Callable[..., Path], extending: Callable[[str], Any], storage: Path, tmp_path: Path
) -> None:
    def key(run_id: str) -> str:
        steps = {step.name: step for step in compile_plan(define(extending(run_id), storage=str(storage))).steps}
        made = steps["train"].key
        assert made is not None
        return str(made({"model": {"path": "/m", "sha256": "m", "bytes": 1}}))

    for run_id in ("night-1", "night-2"):
        finished(run_id)
    from_model = key("")
    first, second = key("night-1"), key("night-2")
    assert len({first, second, from_model}) == 3
    # The same id, and another run behind it.
    shutil.rmtree(storage / "runs/night-1")
    (tmp_path / "night-1").rename(tmp_path / "old")
    finished("night-1", changed=True)
    assert key("night-1") not in {first, second, from_model}


@pytest.mark.usefixtures("ray_cluster")
def test_a_stage_goes_on_from_where_another_run_ended(
    run: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, _ = run(1)
    assert first["extended"] is None
    (tmp_path / "storage/runs/run").rename(tmp_path / "storage/runs/night-1")
    last = tmp_path / "storage/runs/night-1/stages/train/checkpoints/global_step_6"
    found = _extend.Extended(run="night-1", stage="train", step=6, checkpoint=last, content={})
    monkeypatch.setattr(_extend, "extended", lambda *_: found)
    failure(run, 1, {"die": 9}, steps=10, extends="night-1")
    outputs, _ = run(2, steps=10, extends="night-1")
    own = "runs/run/stages/train/checkpoints"
    assert launched(tmp_path, 1)["trainer.resume_from_path"].endswith(f"{own}/global_step_6")
    assert launched(tmp_path, 2)["trainer.resume_from_path"].endswith(f"{own}/global_step_8")
    assert outputs["step"] == 10
    assert outputs["extended"] == {"run": "night-1", "stage": "train", "step": 6}
    steps = [json.loads(text)["step"] for text in Path(outputs["metrics"]["path"]).read_text().splitlines()]
    assert steps == [7, 8, 9, 10]
    assert last.is_dir()


@pytest.mark.usefixtures("ray_cluster")
def test_the_second_stage_of_a_chain_starts_from_the_firsts_merged_model(
    run: Callable[..., Any], tmp_path: Path
) -> None:
    first, _ = run(1)
    (tmp_path / "storage/runs/run/stages/train").rename(tmp_path / "storage/runs/run/stages/warm_up")
    model = first["model"]["path"].replace("stages/train", "stages/warm_up")
    second, _ = run(1, model=model, steps=4, reward={"function": "other.py:score"})
    settings = launched(tmp_path, 1)
    assert settings["actor_rollout_ref.model.path"] == model
    assert settings["trainer.resume_mode"] == "disable"
    assert "/stages/train/checkpoints/" in settings["trainer.default_local_dir"]
    assert settings["reward.custom_reward_function.path"].endswith("other.py")
    assert (second["step"], second["reward"]["first"]) == (4, 0.1)
