from __future__ import annotations

import json
from pathlib import Path

from verl_workflow.spec._supervision import Deadlines, Guard
from verl_workflow.training._guards import GuardedRows
from verl_workflow.training._metrics import MetricsFile
from verl_workflow.training._watch import Watch


def line(step: int, **data: object) -> bytes:
    named = {key.replace("__", "/"): value for key, value in data.items()}
    return json.dumps({"step": step, "data": named}).encode() + b"\n"


def trained(step: int, reward: float = 0.5, seconds: float = 2.0) -> bytes:
    return line(step, critic__score__mean=reward, timing_s__step=seconds)


def test_progress_has_reward_pace_and_time_left(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    watch = Watch(file=MetricsFile(path), total=10, start=2, began=0.0)
    assert (watch.step, watch.look(1.0)) == (2, None)
    path.write_bytes(line(2, val__x=1.0) + trained(3, 0.1, 4.0) + trained(4, 0.2, 2.0) + trained(5, 0.3, 2.0))
    assert watch.look(2.0) == {
        "phase": "training",
        "step": 5,
        "total": 10,
        "reward": 0.3,
        "step_seconds": 2.0,
        "eta_seconds": 10.0,
    }
    assert watch.look(3.0) is None


def test_the_phase_before_the_first_step_is_shown(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    watch = Watch(file=MetricsFile(path), total=10, start=4)
    assert watch.progress() == {"phase": "starting", "step": 4, "total": 10}
    path.touch()
    assert watch.look(1.0) == {"phase": "first step", "step": 4, "total": 10}
    assert watch.look(2.0) is None


def test_alarms_are_handed_on_once(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    guarded = GuardedRows(guards=[Guard(non_finite=True, steps=2)])
    watch = Watch(file=MetricsFile(path), total=10, guarded=guarded)
    path.write_bytes(b"".join(line(step, actor__grad_norm=None, timing_s__step=1.0) for step in (1, 2, 3)))
    watch.look(1.0)
    [alarm] = watch.alarms()
    assert alarm.since == 1
    assert watch.alarms() == []


def test_a_stall_is_judged_by_the_start_the_first_step_and_then_by_the_pace(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    limits = Deadlines(start=100.0, first_step=50.0, times_median=10.0, at_least=5.0)
    watch = Watch(file=MetricsFile(path), total=10, began=0.0, deadlines=limits)
    assert watch.stalled(99.0) is None
    assert "deadlines.start" in str(watch.stalled(101.0))
    path.touch()
    watch.look(90.0)
    assert watch.stalled(139.0) is None
    assert "deadlines.first_step" in str(watch.stalled(141.0))
    path.write_bytes(trained(1, seconds=3.0))
    watch.look(130.0)
    assert watch.stalled(159.0) is None
    assert "for 30 s after step 1" in str(watch.stalled(161.0))


def test_fast_steps_have_time_to_save(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    limits = Deadlines(times_median=10.0, at_least=60.0)
    watch = Watch(file=MetricsFile(path), total=10, began=0.0, deadlines=limits)
    path.write_bytes(trained(1, seconds=0.1))
    watch.look(10.0)
    assert watch.stalled(69.0) is None
    assert "for 60 s" in str(watch.stalled(71.0))
