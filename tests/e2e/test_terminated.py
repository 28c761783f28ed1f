"""A run on this machine that is asked to end, as a cloud does before it takes a machine away."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
from _victims import Command, trained, wait_for

from verl_workflow.storage import Store
from verl_workflow.training._checkpoints import checkpoints
from verl_workflow.training._history import outcomes

PIPELINE = Path(__file__).parents[2] / "pipelines" / "quickstart.yaml"
RUN = "asked-to-end"
pytestmark = [pytest.mark.slow, pytest.mark.fault]


def test_what_is_trained_is_saved_and_gone_on_from(tmp_path: Path) -> None:
    storage = tmp_path / "storage"
    stage_dir = storage / "runs" / RUN / "stages" / "train"
    commands: list[Command] = []

    def command(*words: str) -> Command:
        commands.append(Command([*words, "--storage", str(storage)], tmp_path / "output.log"))
        return commands[-1]

    try:
        # It saves by itself after the tenth step.
        current = command("run", str(PIPELINE), "--run-id", RUN, "-p", "steps=12")
        wait_for(current, Store(str(storage)), RUN, trained("train", 2), "two steps")
        current.process.send_signal(signal.SIGTERM)
        assert current.wait(120) == 143, current.tail()
        assert "the training saves after its step" in current.tail()
        [first, *_] = outcomes(stage_dir)
        assert first.failure is not None
        assert first.failure.preempted
        assert 2 <= first.saved == first.reached < 10
        assert [each.step for each in checkpoints(stage_dir / "checkpoints")] == [first.saved]

        current.stop()
        current = command("resume", RUN)
        assert current.wait() == 0, current.tail()
        last = outcomes(stage_dir)[-1]
        assert (last.start, last.saved) == (first.saved, 12)
    finally:
        for each in commands:
            each.stop()


def test_asked_twice_it_ends_at_once(tmp_path: Path) -> None:
    current = Command(
        ["run", str(PIPELINE), "--run-id", RUN, "-p", "steps=40", "--storage", str(tmp_path)], tmp_path / "output.log"
    )
    try:
        wait_for(current, Store(str(tmp_path)), RUN, trained("train", 1), "a step")
        for process in current.tree():
            if any("WorkerDict" in word for word in process.cmdline()):
                process.suspend()
        current.process.send_signal(signal.SIGTERM)
        while "the training saves" not in current.tail():
            assert current.process.poll() is None, current.tail()
        current.process.send_signal(signal.SIGTERM)
        assert current.wait(120) == 143, current.tail()
        assert "stopping at once" in current.tail()
    finally:
        current.stop()
