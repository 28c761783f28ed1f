"""The same verl training through the pipeline and by hand, side by side in one run, as a ratio of wall times.

By hand is ``python -m verl.trainer.main_ppo`` with the very settings that the pipeline used. Each side starts Ray for
itself, so a side's wall time goes from typing the command to its end. The order of the sides alternates.

Run: python benchmarks/training_overhead.py [--rounds 1] [--steps 40]
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from _by_hand import command, environment, training_only

from verl_workflow.storage import Store
from verl_workflow.workflow import read_run

CLI = Path(sys.executable).with_name("verl-workflow")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--steps", type=int, default=40)
    arguments = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory(prefix="overhead-") as folder:
        pipeline = training_only(Path(folder), steps=arguments.steps, warm_start=False)
        for number in range(arguments.rounds):
            place = Path(folder) / f"round-{number}"
            row = _through_the_pipeline(pipeline, place)
            row |= _by_hand(row.pop("settings"), place)
            rows.append(row)
            print(json.dumps(row), file=sys.stderr, flush=True)
    names = ("command_s", "stage_s", "by_hand_s", "first_step_s", "by_hand_first_step_s")
    result: dict[str, Any] = {name: round(statistics.median(row[name] for row in rows), 1) for name in names}
    result["ratio_stage"] = round(statistics.median(row["stage_s"] / row["by_hand_s"] for row in rows), 3)
    result["ratio_command"] = round(statistics.median(row["command_s"] / row["by_hand_s"] for row in rows), 3)
    print(json.dumps({"rounds": arguments.rounds, "steps": arguments.steps, **result}))


def _through_the_pipeline(pipeline: Path, place: Path) -> dict[str, Any]:
    started = time.time()
    subprocess.run(
        [CLI, "run", pipeline, "--run-id", "bench", "--storage", place / "storage", "--quiet"],
        check=True,
        stdout=sys.stderr,
    )
    command_s = time.time() - started
    state = read_run(Store(str(place / "storage")), "bench")
    train = state.steps["train"].attempts[-1]
    attempt = place / "storage" / "runs" / "bench" / "stages" / "train" / "attempts" / f"{train.number:03d}"
    return {
        "command_s": command_s,
        "stage_s": train.ended_at - train.started_at,
        "first_step_s": _first_step(attempt / "verl_metrics.jsonl") - started,
        "settings": json.loads((attempt / "launch.json").read_text())["settings"],
    }


def _by_hand(settings: dict[str, Any], place: Path) -> dict[str, Any]:
    metrics = place / "by_hand.jsonl"
    started = time.time()
    subprocess.run(
        command(settings, place / "by_hand"),
        check=True,
        cwd=place,
        env=environment(settings, metrics),
        stdout=sys.stderr,
    )
    return {"by_hand_s": time.time() - started, "by_hand_first_step_s": _first_step(metrics) - started}


def _first_step(metrics: Path) -> float:
    """When the first step ended: the logger's file has no clock, so it is reckoned back from its last write."""
    rows = [json.loads(line) for line in metrics.read_text().splitlines()]
    seconds = [row["data"]["timing_s/step"] for row in rows if "timing_s/step" in row["data"]]
    return metrics.stat().st_mtime - sum(seconds[1:])


if __name__ == "__main__":
    main()
