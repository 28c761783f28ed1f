"""The process in which verl trains: ``python -m verl_workflow.training.entry <attempt dir>``.

It reads ``launch.json`` (settings, pid of the supervisor), runs what verl's own ``main_ppo`` runs, and says how that
ended in ``result.json``. It dies with its supervisor, and with it its Ray job: actors, placement groups and all.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys
import traceback
from pathlib import Path
from typing import Any

from verl_workflow.training._attempt import RESULT
from verl_workflow.training.failures import error_chain
from verl_workflow.verl_config._compose import compose_config

_PR_SET_PDEATHSIG = 1


def main(attempt_dir: Path) -> int:
    """0 when verl's training returned, 1 when it raised; `result.json` has the particulars either way."""
    launch = json.loads((attempt_dir / "launch.json").read_text(encoding="utf-8"))
    _die_with(launch["supervisor"])
    try:
        _train(launch["settings"])
    except Exception as error:  # noqa: BLE001 - the process boundary: everything goes into result.json
        traceback.print_exc()
        _write(attempt_dir, {"ok": False, "errors": error_chain(error)})
        return 1
    _write(attempt_dir, {"ok": True})
    return 0


def _train(settings: dict[str, Any]) -> None:
    """The body of ``verl.trainer.main_ppo.main``, on a configuration of our own making."""
    config = compose_config(settings)

    from verl.trainer.main_ppo import TaskRunnerV1, run_ppo
    from verl.trainer.ppo.utils import need_critic, need_reference_policy
    from verl.utils.config import validate_config
    from verl.utils.device import auto_set_device

    auto_set_device(config)
    validate_config(
        config=config,
        use_reference_policy=need_reference_policy(config),
        use_critic=need_critic(config),
    )
    run_ppo(config, task_runner_class=TaskRunnerV1)


def _die_with(supervisor: int) -> None:
    """Ask the kernel for SIGKILL when the supervisor ends, which would otherwise leave the training behind."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    # Of a process that was forked for it by a warm server the server is the parent, which ends it in the same way.
    parent = int(os.environ.pop("VERL_WORKFLOW_FORKED_BY", supervisor))
    if os.getppid() != parent:
        raise SystemExit("the supervisor ended before the training began")


def _write(attempt_dir: Path, result: dict[str, Any]) -> None:
    partial = attempt_dir / f"{RESULT}.partial"
    partial.write_text(json.dumps(result, indent=1), encoding="utf-8")
    partial.replace(attempt_dir / RESULT)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
