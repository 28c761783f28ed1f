"""Stands in for verl's process: writes what verl would write, and ends as a plan says.

The plan is JSON in the file that STANDIN_PLAN names; all keys may be left out:

    last: the step after which it ends. die: the step after which it is killed.
    hang: ``start`` or the step at which it stands still.
    tear: the step whose checkpoint lacks a file. nan, nan_from: the step, or the first of those, with dead gradients.
    kl: divergence by step. pause: seconds after each step.
    log: text that it prints at the end. error: what `result.json` says of its failure.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

from _training_pieces import checkpoint

from verl_workflow.training._publish import publish


def main(attempt_dir: Path) -> int:
    settings = json.loads((attempt_dir / "launch.json").read_text())["settings"]
    plan: dict[str, Any] = json.loads(Path(os.environ["STANDIN_PLAN"]).read_text())
    root = Path(settings["trainer.default_local_dir"])
    supervised = settings["trainer.v1.supervised"]
    resumed = settings.get("trainer.resume_from_path", "global_step_0")
    begun = int(resumed.rsplit("_", 1)[1])
    last = min(plan.get("last", settings["trainer.total_training_steps"]), settings["trainer.total_training_steps"])
    if plan.get("hang") == "start":
        wait_for_ever()
    with Path(os.environ["VERL_FILE_LOGGER_PATH"]).open("wb", buffering=0) as log:
        for step in range(begun + 1, last + 1):
            if plan.get("hang") == step:
                wait_for_ever()
            if step % settings["trainer.save_freq"] == 0 or step == last:
                folder = publish(
                    checkpoint(root, step),
                    Path(supervised["checkpoints"]),
                    owner=supervised["owner"],
                    identity=supervised["identity"],
                    roles=supervised["roles"],
                )
                if plan.get("tear") == step:
                    (folder / "data.pt").unlink()
            gone = plan.get("nan") == step or plan.get("nan_from", step + 1) <= step
            data = {
                "critic/score/mean": step / 10,
                "timing_s/step": 0.1,
                "actor/grad_norm": None if gone else 0.1,
                "actor/ppo_kl": plan.get("kl", {}).get(str(step), 0.0),
            }
            log.write(json.dumps({"step": step, "data": data}).encode() + b"\n")
            time.sleep(plan.get("pause", 0.0))
            if plan.get("die") == step:
                os.kill(os.getpid(), signal.SIGKILL)
    if "log" in plan:
        print(plan["log"])
    if "error" in plan:
        print("the stand-in is about to fail")
        result = {"ok": False, **plan["error"]}
    else:
        result = {"ok": True}
    (attempt_dir / "result.json").write_text(json.dumps(result))
    return 0 if result["ok"] else 1


def wait_for_ever() -> None:
    while True:
        time.sleep(3600)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
