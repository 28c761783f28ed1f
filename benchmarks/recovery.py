"""From kill -9 of verl's process to the first step after it: through the pipeline, with a warm start, and by hand.

By hand, ``python -m verl.trainer.main_ppo`` is started again at once, as nobody does at night. Each side is killed
after the same step. Told are seconds from the kill to the end of the first step that is new, and steps that were lost.

Run: python benchmarks/recovery.py [--rounds 1] [--kill-after 7] [--save-every 5]
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
from _by_hand import command, environment, training_only

from verl_workflow.warm import forked_for

CLI = Path(sys.executable).with_name("verl-workflow")
_PATIENCE_S = 900.0
_STEPS = 40


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--kill-after", type=int, default=7)
    parser.add_argument("--save-every", type=int, default=5)
    arguments = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory(prefix="recovery-") as folder:
        for number in range(arguments.rounds):
            place = Path(folder) / f"round-{number}"
            place.mkdir()
            cold, settings = _pipeline(place / "cold", arguments, warm=False)
            warm, _ = _pipeline(place / "warm", arguments, warm=True)
            hand = _by_hand(settings, place, arguments)
            rows.append({"pipeline": cold, "warm": warm, "by_hand": hand})
            print(json.dumps(rows[-1]), file=sys.stderr, flush=True)
    told: dict[str, Any] = {}
    for side in ("pipeline", "warm", "by_hand"):
        for name in ("first_step_s", "recovery_s", "steps_lost"):
            told[f"{side}_{name}"] = round(statistics.median(row[side][name] for row in rows), 1)
    told["ratio"] = round(told["pipeline_recovery_s"] / told["by_hand_recovery_s"], 3)
    told["ratio_warm"] = round(told["warm_recovery_s"] / told["by_hand_recovery_s"], 3)
    print(json.dumps({"rounds": arguments.rounds, "save_every": arguments.save_every, **told}))


def _pipeline(place: Path, arguments: argparse.Namespace, *, warm: bool) -> tuple[dict[str, float], dict[str, Any]]:
    place.mkdir()
    file = training_only(place, steps=_STEPS, save_every=arguments.save_every, warm_start=warm)
    storage = place / "storage"
    attempts = storage / "runs" / "bench" / "stages" / "train" / "attempts"
    started = time.time()
    words = [str(CLI), "run", str(file), "--run-id", "bench", "--storage", str(storage), "--quiet"]
    with _ended(subprocess.Popen(words, stdout=sys.stderr, start_new_session=True)):
        first = attempts / "001" / "verl_metrics.jsonl"
        began = _wait_for_step(first, 1)
        _wait_for_step(first, arguments.kill_after)
        killed = time.time()
        _process_of(attempts / "001").send_signal(signal.SIGKILL)
        second = attempts / "002" / "verl_metrics.jsonl"
        lost = _step_of(first) - (_first_new(second) - 1)
        recovered = _wait_for_step(second, 1) - killed
    settings = json.loads((attempts / "001" / "launch.json").read_text())["settings"]
    return {"first_step_s": began - started, "recovery_s": recovered, "steps_lost": float(lost)}, settings


def _by_hand(settings: dict[str, Any], place: Path, arguments: argparse.Namespace) -> dict[str, float]:
    first, second = place / "first.jsonl", place / "second.jsonl"
    words = command(settings, place / "by_hand")
    started = time.time()
    child = subprocess.Popen(
        words, cwd=place, env=environment(settings, first), stdout=sys.stderr, stderr=sys.stderr, start_new_session=True
    )
    with _ended(child):
        began = _wait_for_step(first, 1)
        _wait_for_step(first, arguments.kill_after)
        killed = time.time()
        child.kill()
        child.wait()
        again = subprocess.Popen(
            words,
            cwd=place,
            env=environment(settings, second),
            stdout=sys.stderr,
            stderr=sys.stderr,
            start_new_session=True,
        )
        with _ended(again):
            lost = _step_of(first) - (_first_new(second) - 1)
            recovered = _wait_for_step(second, 1) - killed
    return {"first_step_s": began - started, "recovery_s": recovered, "steps_lost": float(lost)}


@contextmanager
def _ended(child: subprocess.Popen[bytes]) -> Iterator[None]:
    """What the child has started ends with it, and nothing else does."""
    try:
        yield
    finally:
        mine = psutil.Process(child.pid).children(recursive=True) if child.poll() is None else []
        for process in mine:
            if process.is_running():
                process.kill()
        if child.poll() is None:
            os.killpg(child.pid, signal.SIGKILL)
        child.wait()


def _rows(metrics: Path) -> list[dict[str, Any]]:
    if not metrics.exists():
        return []
    found = []
    for line in metrics.read_text().splitlines():
        try:
            row = json.loads(line)
        except ValueError:
            continue
        if "timing_s/step" in row["data"]:
            found.append(row)
    return found


def _wait_for_step(metrics: Path, count: int) -> float:
    """When the file had so many steps, by the clock."""
    deadline = time.time() + _PATIENCE_S
    while time.time() < deadline:
        if len(_rows(metrics)) >= count:
            return time.time()
        time.sleep(0.05)
    raise SystemExit(f"{metrics} never had {count} steps")


def _step_of(metrics: Path) -> int:
    return max(int(row["step"]) for row in _rows(metrics))


def _first_new(metrics: Path) -> int:
    _wait_for_step(metrics, 1)
    return min(int(row["step"]) for row in _rows(metrics))


def _process_of(attempt: Path) -> psutil.Process:
    """verl's process: by the attempt's folder among its words, or that which was forked for it."""
    for process in psutil.process_iter():
        try:
            words = process.cmdline()
            if "verl_workflow.training.entry" in words and str(attempt) in words:
                return psutil.Process(forked_for(words, process.pid) or process.pid)
        except psutil.Error:
            continue
    raise SystemExit("verl's process is not there")


if __name__ == "__main__":
    main()
