"""A pipeline run as a user starts it, and the processes of it that a test can kill."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import psutil

from verl_workflow.errors import UserError
from verl_workflow.storage import Store
from verl_workflow.workflow import RunState, StepStatus, read_run

CLI = Path(sys.executable).with_name("verl-workflow")
PATIENCE_S = 600.0


class Command:
    """`verl-workflow ...` in a process group of its own; output goes to a file."""

    def __init__(self, arguments: Sequence[str], log: Path) -> None:
        self.log = log
        with log.open("ab") as stream:
            self.process = subprocess.Popen(
                [str(CLI), *arguments],
                stdin=subprocess.DEVNULL,
                stdout=stream,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def wait(self, timeout: float = PATIENCE_S) -> int:
        return self.process.wait(timeout)

    def stop(self) -> None:
        """End what this test started, and nothing else."""
        for process in self.tree():
            if process.is_running():
                process.kill()
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait(30)

    def tree(self) -> list[psutil.Process]:
        try:
            return psutil.Process(self.process.pid).children(recursive=True)
        except psutil.NoSuchProcess:
            return []

    def tail(self) -> str:
        return self.log.read_text(errors="replace")[-4000:]


def kill_command(command: Command, *, machine: bool) -> None:
    """The user's own process, and with it the local cluster, without a chance to clean up.

    Returns when all that could touch the run is gone. Ray's agents, which only report, notice a minute or two later.

    Args:
        machine: kill the cluster's processes too, as when the machine is lost; they need 20 seconds to notice that
            their owner is gone.
    """
    command.process.kill()
    command.process.wait(30)
    victims = [process for process in psutil.process_iter() if _is_of(process, command) and not _is_agent(process)]
    for process in victims if machine else []:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    _, left = psutil.wait_procs(victims, timeout=90)
    assert not left, f"outlived the command: {left}"


def _is_of(process: psutil.Process, command: Command) -> bool:
    """Whether it descends from the command, dead or alive: Ray starts no session of its own."""
    try:
        return os.getsid(process.pid) == command.process.pid
    except ProcessLookupError:
        return False


def _is_agent(process: psutil.Process) -> bool:
    try:
        return process.name().endswith("Agent")
    except psutil.NoSuchProcess:
        return False


def kill_head(command: Command) -> None:
    """Ray's head alone, the process that holds the cluster's state: the driver works on for a while."""
    _named(command, "gcs_server").kill()


def kill_head_node(command: Command, state: RunState) -> None:
    """Ray's head and all that runs on its node, as when the machine is lost, but for the user's own process."""
    kill_driver(state)
    for process in command.tree():
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()


def kill_training(command: Command) -> None:
    """The verl process, but not its supervisor."""
    _named(command, "verl_workflow.training.entry").kill()


def kill_driver(state: RunState) -> None:
    """The worker process of the actor that drives the run."""
    assert state.owner is not None
    psutil.Process(state.owner["pid"]).kill()


def _named(command: Command, text: str) -> psutil.Process:
    for process in command.tree():
        try:
            if any(text in part for part in process.cmdline()):
                return process
        except psutil.NoSuchProcess:
            continue
    raise AssertionError(f"no process with {text!r} in its command line; output was\n{command.tail()}")


def wait_for(command: Command, store: Store, run_id: str, ready: Callable[[RunState], bool], what: str) -> RunState:
    """The first state of the run that is `ready`; fails when the command ends before, or patience does."""
    deadline = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline:
        state = _state(store, run_id)
        if state is not None and ready(state):
            return state
        assert command.process.poll() is None, f"the command ended before {what}; output was\n{command.tail()}"
        time.sleep(0.05)
    raise AssertionError(f"{what} did not come within {PATIENCE_S:g} s; output was\n{command.tail()}")


def freeze_at(command: Command, store: Store, run_id: str, ready: Callable[[RunState], bool], what: str) -> RunState:
    """Like `wait_for`, and the driver stands still when it returns, for the caller to kill.

    A driver commits a stage, so it is let go on for a few milliseconds at a time and looked at while it is stopped:
    a stage of a hundredth of a second is met too, however late the machine lets this process run.
    """
    deadline = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline:
        state = _state(store, run_id)
        driver = _driver(command, state)
        if driver is None:
            time.sleep(0.02)
        else:
            with contextlib.suppress(psutil.NoSuchProcess):
                driver.suspend()
                state = _state(store, run_id)
                if state is not None and ready(state):
                    return state
                driver.resume()
                time.sleep(0.01)
        assert command.process.poll() is None, f"the command ended before {what}; output was\n{command.tail()}"
    raise AssertionError(f"{what} did not come within {PATIENCE_S:g} s; output was\n{command.tail()}")


def _state(store: Store, run_id: str) -> RunState | None:
    try:
        return read_run(store, run_id)
    except UserError:
        return None


def _driver(command: Command, state: RunState | None) -> psutil.Process | None:
    """The process that drives the run, when it is one of this command's and alive."""
    if state is None or state.owner is None:
        return None
    try:
        process = psutil.Process(state.owner["pid"])
    except psutil.NoSuchProcess:
        return None
    return process if _is_of(process, command) else None


def running(stage: str, *, after_epoch: int = 0) -> Callable[[RunState], bool]:
    """The stage is being executed by a driver that came after that epoch."""

    def ready(state: RunState) -> bool:
        step = state.steps.get(stage)
        return state.epoch > after_epoch and step is not None and step.status is StepStatus.RUNNING

    return ready


def trained(stage: str, step: int) -> Callable[[RunState], bool]:
    """The stage has reported that many training steps."""
    return lambda state: stage in state.steps and (state.steps[stage].progress or {}).get("step", 0) >= step
