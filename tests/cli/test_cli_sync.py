from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from _runs import Invoke, Runs

from verl_workflow.trackers import Facts
from verl_workflow.trackers._facts import keep


def stage_of(runs: Runs, *trackers: dict[str, Any]) -> Path:
    runs.finish("r1", {"train": lambda _: {"step": 2}})
    attempt = runs.log("r1", "train", 1).parent
    rows = [{"step": step, "data": {"critic/score/mean": 0.5, "timing_s/step": 1.0}} for step in (1, 2)]
    (attempt / "verl_metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    stage = attempt.parent.parent
    if trackers:
        keep(stage, Facts(run_id="r1", stage="train", records="runs/r1/01", trackers=list(trackers)))
    return stage


def test_what_trackers_have_not_got_is_sent_once(runs: Runs, invoke: Invoke) -> None:
    stage = stage_of(runs, {"kind": "tensorboard", "folder": None})
    first = invoke("sync", "r1")
    assert first.exit_code == 0
    assert first.stdout == "train: 0-tensorboard: 2 steps sent, it has all up to 2\n"
    assert list((stage / "trackers/0-tensorboard").iterdir())
    assert "0 steps sent" in invoke("sync", "r1").stdout


def test_a_tracker_that_does_not_take_them_is_told(runs: Runs, invoke: Invoke) -> None:
    stage_of(runs, {"kind": "mlflow", "uri": "http://127.0.0.1:9", "experiment": "x"})
    shown = invoke("sync", "r1", "--json")
    assert shown.exit_code == 1
    [told] = json.loads(shown.stdout)["trackers"]
    assert told["failed"]
    assert (told["sent"], told["up_to"]) == (0, 0)


def test_a_run_without_trackers_has_nothing_to_send(runs: Runs, invoke: Invoke) -> None:
    stage_of(runs)
    shown = invoke("sync", "r1")
    assert (shown.exit_code, shown.stdout) == (0, "the run has no trackers\n")


def test_a_stage_that_is_not_there_is_refused(runs: Runs, invoke: Invoke) -> None:
    stage_of(runs)
    assert invoke("sync", "r1", "--stage", "trian").exit_code == 2
    assert invoke("sync", "r2").exit_code == 2
