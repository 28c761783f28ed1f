"""The same graphs on this library and on Ray Workflows as it was last (Ray 2.47.1), side by side in one run.

Run: python benchmarks/workflow_vs_ray247.py [--rounds 3] [--environment DIR]

Makes an environment with Ray 2.47.1 (by uv) unless DIR has one. Each side runs in processes of its own, in turns; the
figures are medians over the rounds, ratios above 1 say how much faster this library is.

    fan_out_200       200 steps that do nothing, and one that waits for them
    chain_200         200 steps, each behind the last
    results_1mb_50    50 steps that return 1 MB each
    resume_1000       taking up a workflow with 1,000 finished steps and one that is left
    list_1000         listing 1,000 finished workflows
    plain_fan_out_200 the same as fan_out_200 by Ray's tasks alone, nothing written down
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import venv
from pathlib import Path

ORIGINAL = ("ray==2.47.1", "pyarrow")
SIDES = ("ours", "original")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--environment", type=Path, help="of Ray 2.47.1; made when it is not there")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="vw-") as scratch:
        interpreters = {"ours": sys.executable, "original": _environment(arguments.environment or Path(scratch, "env"))}
        rounds: dict[str, list[dict[str, float]]] = {side: [] for side in SIDES}
        for number in range(arguments.rounds):
            # In turns: what the machine does besides is shared.
            for side in SIDES if number % 2 else reversed(SIDES):
                rounds[side].append(_measure(interpreters[side], side))
                print(json.dumps({"round": number, "side": side, **rounds[side][-1]}), file=sys.stderr, flush=True)
    seconds = {side: _medians(found) for side, found in rounds.items()}
    ratios = {name: round(seconds["original"][name] / seconds["ours"][name], 2) for name in seconds["ours"]}
    over_plain = statistics.median(each["fan_out_200"] / each["plain_fan_out_200"] for each in rounds["ours"])
    print(
        json.dumps(
            {"seconds": seconds, "times_faster": ratios, "fan_out_over_plain_ray": round(over_plain, 2)}, indent=2
        )
    )


def _environment(folder: Path) -> str:
    interpreter = folder / "bin" / "python"
    if not interpreter.exists():
        venv.create(folder, with_pip=False)
        uv = Path(sys.executable).with_name("uv")
        environment = {**os.environ, "VIRTUAL_ENV": str(folder)}
        if "PIP_FIND_LINKS" in os.environ:
            environment.setdefault("UV_FIND_LINKS", os.environ["PIP_FIND_LINKS"])
        subprocess.run([str(uv), "pip", "install", "--quiet", *ORIGINAL], check=True, env=environment)
    return str(interpreter)


def _measure(interpreter: str, side: str) -> dict[str, float]:
    script = Path(__file__).with_name("_workflow_side.py")
    # Where the first one's graphs are built is no module path of the other one's.
    environment = {name: value for name, value in os.environ.items() if side == "ours" or name != "PYTHONPATH"}
    with tempfile.TemporaryDirectory(prefix="vw-") as folder:
        done = subprocess.run(
            [interpreter, str(script), side, folder],
            check=True,
            stdout=subprocess.PIPE,
            env={**environment, "RAY_AUTH_MODE": "disabled", "RAY_raylet_start_wait_time_s": "120"},
        )
    return dict(json.loads(done.stdout.splitlines()[-1]))


def _medians(rounds: list[dict[str, float]]) -> dict[str, float]:
    return {name: round(statistics.median(each[name] for each in rounds), 4) for name in rounds[0]}


if __name__ == "__main__":
    main()
