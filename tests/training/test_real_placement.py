"""Real verl on the CPU in groups that the stage holds: killed, and resumed in the same ones."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from _real_training import at_step, prepared, processes
from _training_pieces import launched

from verl_workflow.errors import VerlWorkflowError
from verl_workflow.training import run_verl_stage
from verl_workflow.training._names import StageName
from verl_workflow.training._reaper import training_jobs

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.usefixtures("ray_cluster")]


def groups() -> dict[str, str]:
    """Placement groups of the cluster by name, with their ids."""
    import ray

    table = ray.util.placement_group_table()
    return {one["name"]: one["placement_group_id"] for one in table.values() if one["state"] != "REMOVED"}


def test_a_training_that_is_killed_goes_on_in_the_same_groups(tmp_path: Path, context: Callable[..., Any]) -> None:
    import ray

    spec, attempt = prepared(tmp_path, context, steps=5, retry={"attempts": 3, "backoff": 0.0})
    seen: list[dict[str, str]] = []

    def look_and_kill() -> None:
        seen.append(groups())
        [driver] = processes(first.attempt_dir, "verl_workflow.training.entry")
        os.kill(driver.pid, signal.SIGKILL)

    first = attempt(1, report=at_step(2, look_and_kill))
    stage = StageName.of(first)
    with pytest.raises(VerlWorkflowError) as caught:
        run_verl_stage(spec, first)
    assert caught.value.retryable, str(caught.value)
    [held] = launched(tmp_path, 1)["trainer.v1.supervised"]["groups"]["global_pool"]
    # verl has made none of its own.
    assert list(seen[0].values()) == [held]
    assert next(iter(seen[0])).startswith(stage.groups)
    assert held in groups().values()
    assert ray.available_resources().get("GPU", 0) == 0

    second = attempt(2, report=at_step(4, lambda: seen.append(groups())))
    assert run_verl_stage(spec, second)["step"] == 5
    assert launched(tmp_path, 2)["trainer.v1.supervised"]["groups"] == {"global_pool": [held]}
    assert list(seen[1].values()) == [held]
    assert held not in groups().values()
    jobs = [job for job in training_jobs() if job.stage == stage]
    assert [job.owner for job in sorted(jobs, key=lambda job: job.began)] == ["1.1", "1.2"]
