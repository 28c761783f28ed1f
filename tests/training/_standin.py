"""Stands in for verl's process: writes what verl would write, and ends as ``plan.json`` beside the run says."""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

from _training_pieces import checkpoint

from verl_workflow.training._checkpoints import write_manifest


def main(attempt_dir: Path) -> int:
    settings = json.loads((attempt_dir / "launch.json").read_text())["settings"]
    plan: dict[str, Any] = json.loads(Path(os.environ["STANDIN_PLAN"]).read_text())
    root = Path(settings["trainer.default_local_dir"])
    resumed = settings.get("trainer.resume_from_path", "global_step_0")
    begun = int(resumed.rsplit("_", 1)[1])
    last = min(plan.get("last", settings["trainer.total_training_steps"]), settings["trainer.total_training_steps"])
    with Path(os.environ["VERL_FILE_LOGGER_PATH"]).open("wb", buffering=0) as log:
        for step in range(begun + 1, last + 1):
            if step % settings["trainer.save_freq"] == 0 or step == last:
                folder = checkpoint(root, step)
                write_manifest(folder)
                if plan.get("tear") == step:
                    (folder / "data.pt").unlink()
            gradient = None if plan.get("nan") == step else 0.1
            data = {"critic/score/mean": step / 10, "timing_s/step": 0.1, "actor/grad_norm": gradient}
            log.write(json.dumps({"step": step, "data": data}).encode() + b"\n")
            if plan.get("die") == step:
                os.kill(os.getpid(), signal.SIGKILL)
    if "error" in plan:
        print("the stand-in is about to fail")
        result = {"ok": False, "class": plan["error"], "errors": [{"type": "x.Y", "message": "the cause"}]}
    else:
        result = {"ok": True}
    (attempt_dir / "result.json").write_text(json.dumps(result))
    return 0 if result["ok"] else 1


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
