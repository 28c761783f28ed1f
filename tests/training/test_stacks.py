"""What is read off the stacks of a training that stands still."""

from __future__ import annotations

from pathlib import Path

from verl_workflow.training._stacks import frames_in

STACK = """Process 29422: ray::RewardLoopWorker.compute_score
Python v3.11.7 (/usr/bin/python3.11)

Thread 29422 (idle): "MainThread"
    wait (threading.py:327)
    run_single (verl/experimental/reward_loop/naive.py:70)
Thread 29500 (active): "asyncio_0"
    score (reward.py:6)
    run (concurrent/futures/thread.py:58)
Thread 29501 (active): "asyncio_1"
    score (reward.py:6)
"""


def test_frames_of_the_users_files_are_told_once_with_their_process(tmp_path: Path) -> None:
    (tmp_path / "code/task").mkdir(parents=True)
    (tmp_path / "code/task/reward.py").touch()
    stacks = [tmp_path / "one.txt", tmp_path / "two.txt"]
    stacks[0].write_text(STACK)
    stacks[1].write_text("the stack could not be read: Permission denied\n")
    assert frames_in(stacks, tmp_path / "code") == ["score (reward.py:6), in ray::RewardLoopWorker.compute_score"]
    assert frames_in(stacks, tmp_path / "elsewhere") == []
