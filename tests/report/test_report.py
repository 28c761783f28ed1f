from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from verl_workflow.errors import ErrorCode, UserError
from verl_workflow.report import Learning, Mark, draw, learning_of
from verl_workflow.storage import Store
from verl_workflow.workflow import Driver, InlineLauncher, Plan, RunState, Step, create_run, read_run

STAGES: list[dict[str, Any]] = [
    {"name": "baseline", "kind": "evaluate", "model": "${model}"},
    {"name": "train", "kind": "verl", "model": "${model}"},
    {"name": "evaluate", "kind": "evaluate", "model": "${train.model}"},
]


@pytest.fixture
def run(tmp_path: Path) -> RunState:
    """A run whose training was taken up again at step 2."""
    store = Store(str(tmp_path))
    create_run(store, "night", {"pipeline": {"name": "sums", "stages": STAGES}, "artifacts": str(tmp_path)})
    values = {
        "baseline": {"candidate": {"score": 0.1, "acc": 0.25}},
        "train": {"step": 3},
        "evaluate": {"candidate": {"score": 0.75}},
    }
    steps = tuple(Step(name=name, call=lambda _, value=value: value) for name, value in values.items())
    Driver(store=store, run_id="night", plan=Plan(steps=steps), launcher=InlineLauncher()).run()
    log(tmp_path, 1, [(0, None, 0.2), (1, 0.3, None), (2, 0.9, None)])
    log(tmp_path, 2, [])
    log(tmp_path, 3, [(2, 0.4, None), (3, 0.5, 0.7)])
    return read_run(store, "night")


def log(root: Path, attempt: int, rows: list[tuple[int, float | None, float | None]]) -> None:
    folder = root / "runs" / "night" / "stages" / "train" / "attempts" / f"{attempt:03d}"
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "verl_metrics.jsonl").open("w") as stream:
        for step, reward, validation in rows:
            data: dict[str, float] = {} if reward is None else {"critic/score/mean": reward, "timing_s/step": 1.0}
            if validation is not None:
                data |= {"val-core/a/acc/mean@1": validation - 0.1, "val-core/b/reward/mean@1": validation + 0.1}
            stream.write(json.dumps({"step": step, "data": data}) + "\n")


def test_a_step_trained_twice_counts_as_it_was_the_last_time(run: RunState) -> None:
    (learning,) = learning_of(run)
    assert learning.rewards == ((1, 0.3), (2, 0.4), (3, 0.5))
    assert learning.resumed == (2,)


def test_validations_are_averaged_over_data_sources(run: RunState) -> None:
    assert [(step, round(score, 6)) for step, score in learning_of(run)[0].validations] == [(0, 0.2), (3, 0.7)]


def test_evaluations_stand_where_their_model_does(run: RunState) -> None:
    assert learning_of(run)[0].marks == (
        Mark(label="baseline", step=0, score=0.25),
        Mark(label="evaluate", step=3, score=0.75),
    )


def test_a_run_without_a_step_has_nothing_to_draw(tmp_path: Path) -> None:
    store = Store(str(tmp_path))
    create_run(store, "night", {"pipeline": {"name": "sums", "stages": STAGES}, "artifacts": str(tmp_path)})
    assert learning_of(read_run(store, "night")) == []


@pytest.mark.parametrize(("suffix", "magic"), [("png", b"\x89PNG"), ("svg", b"<?xml"), ("pdf", b"%PDF")])
def test_the_suffix_decides_the_format(run: RunState, tmp_path: Path, suffix: str, magic: bytes) -> None:
    draw(learning_of(run), tmp_path / f"curve.{suffix}", title="sums: night")
    assert (tmp_path / f"curve.{suffix}").read_bytes().startswith(magic)


def test_the_picture_shows_each_series_and_resumption(tmp_path: Path) -> None:
    learning = Learning(
        stage="train",
        rewards=((1, 0.1), (2, 0.6)),
        validations=((2, 0.5),),
        resumed=(2,),
        marks=(Mark(label="evaluate", step=2, score=0.625),),
    )
    draw([learning], tmp_path / "curve.svg", title="sums: night")
    # Text is drawn as glyphs, each word told in a comment before them.
    picture = (tmp_path / "curve.svg").read_text()
    for words in ("sums: night", "reward while training", "resumed", "evaluate: 0.625", "step of train"):
        assert f"<!-- {words} -->" in picture


def test_an_unknown_format_is_refused_by_name(run: RunState, tmp_path: Path) -> None:
    with pytest.raises(UserError) as caught:
        draw(learning_of(run), tmp_path / "curve.doc", title="")
    assert caught.value.code is ErrorCode.SPEC_INVALID
    assert "png" in str(caught.value)
