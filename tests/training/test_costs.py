from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from verl_workflow.training._costs import known_attempts, spent
from verl_workflow.training._history import Outcome, record


def attempt(number: int, hours: float, start: int, reached: int, saved: int, **more: Any) -> Outcome:
    times = {"began": 0.0, "ended": 1.0, "trained_s": hours * 3600}
    return Outcome(
        **{"attempt": number, "epoch": 1, "start": start, "reached": reached, "saved": saved, **times, **more}
    )


def test_one_attempt_that_was_through_wasted_nothing() -> None:
    cost = spent([attempt(1, 2.0, 0, 50, 50, gpus=8)])
    assert (cost.used, cost.wasted, cost.gpus) == (16.0, 0.0, 8)


def test_steps_that_were_trained_again_are_wasted() -> None:
    cost = spent([attempt(1, 1.0, 0, 10, 8), attempt(2, 1.0, 8, 20, 20)])
    assert (cost.used, cost.wasted, cost.gpus) == (2.0, pytest.approx(0.2), 0)


def test_steps_that_no_checkpoint_holds_are_wasted() -> None:
    assert spent([attempt(1, 1.0, 0, 10, 5)]).wasted == pytest.approx(0.5)
    assert spent([attempt(1, 1.0, 0, 10, 10)]).wasted == 0.0


def test_an_attempt_that_trained_no_step_is_wasted() -> None:
    assert spent([attempt(1, 1.0, 4, 4, 4), attempt(2, 3.0, 4, 8, 8)]).wasted == pytest.approx(1.0)


def test_what_a_rollback_set_aside_is_wasted() -> None:
    first, second = attempt(1, 1.0, 0, 10, 10), attempt(2, 1.0, 4, 10, 10)
    assert spent([first, second]).wasted == pytest.approx(0.6)


def test_a_rollback_behind_several_attempts_wastes_of_each_what_lies_after_it() -> None:
    attempts = [attempt(1, 1.0, 0, 10, 10), attempt(2, 1.0, 10, 20, 20), attempt(3, 1.0, 5, 20, 20)]
    assert spent(attempts).wasted == pytest.approx(1.5)


def test_of_an_attempt_that_goes_on_nothing_is_lost_yet() -> None:
    attempts = [attempt(1, 1.0, 0, 10, 5), attempt(2, 1.0, 5, 9, 5, ended=None)]
    assert spent(attempts, running=True).wasted == pytest.approx(0.5)
    assert spent(attempts).wasted == pytest.approx(1.5)


def test_an_attempt_between_that_never_trained_hides_nothing() -> None:
    waited = attempt(2, 0.0, 0, 0, 8)
    assert spent([attempt(1, 1.0, 0, 10, 8), waited, attempt(3, 1.0, 8, 20, 20)]).wasted == pytest.approx(0.2)


def test_nothing_cost_nothing() -> None:
    assert spent([]).used == 0.0


def test_of_a_lost_attempt_its_files_tell(tmp_path: Path) -> None:
    folder = tmp_path / "attempts/001"
    folder.mkdir(parents=True)
    rows = [{"step": step, "data": {"timing_s/step": 1.0}} for step in (5, 6, 7)]
    (folder / "verl_metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    written = (folder / "verl_metrics.jsonl").stat().st_mtime
    record(folder, Outcome(attempt=1, epoch=1, began=written - 60))
    [seen] = known_attempts(tmp_path)
    assert (seen.start, seen.reached, seen.saved, seen.ended) == (4, 7, 0, None)
    assert seen.trained_s == pytest.approx(60)
    for step in (4, 6, 8):
        (tmp_path / f"checkpoints/global_step_{step}").mkdir(parents=True)
    assert known_attempts(tmp_path)[0].saved == 6


def test_a_record_that_cannot_be_read_is_passed_over(tmp_path: Path) -> None:
    for number, text in ((1, "{"), (2, "{}"), (3, '{"failure": {"class": "no such"}}')):
        folder = tmp_path / f"attempts/{number:03d}"
        folder.mkdir(parents=True)
        (folder / "outcome.json").write_text(text)
    assert known_attempts(tmp_path) == []
    assert known_attempts(tmp_path / "nowhere") == []
