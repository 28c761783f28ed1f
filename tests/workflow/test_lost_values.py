"""Values that are not kept, and are lost with their node."""

from __future__ import annotations

import threading
import time
from concurrent.futures import Future
from typing import Any

from _graphs import node, output, record

from verl_workflow.errors import ErrorCode, VerlWorkflowError
from verl_workflow.storage import Store
from verl_workflow.workflow import Driver, InlineLauncher, Step, read_run
from verl_workflow.workflow._attempt import Call, Outcome, Raised


class Losing(InlineLauncher):
    """Loses what the first attempt at a step is given."""

    def __init__(self, step: str) -> None:
        super().__init__()
        self._step = step
        self.lost = 0

    def start(self, step: Step, call: Call, held: tuple[Any, ...] = ()) -> Future[Outcome]:
        if step.name != self._step or self.lost:
            return super().start(step, call, held)
        self.lost += 1
        gone: Future[Outcome] = Future()
        error = VerlWorkflowError(ErrorCode.WORKER_LOST, "its node is lost", retryable=True)
        # When other users of the value wait for a slow step alone.
        threading.Timer(0.1, lambda: gone.set_result(Raised.of(error, lost_inputs=True))).start()
        return gone


def one() -> int:
    return 1


def add(*numbers: int) -> int:
    return sum(numbers)


def drive(store: Store, root: Any, losing: str) -> None:
    launcher = Losing(losing)
    Driver(store, "r", record(store, "r", root), launcher, lease_s=0.05, heartbeat_s=60.0, poll_s=0.02).run()
    assert launcher.lost == 1


def test_a_value_that_is_lost_for_one_of_its_users_is_brought_back_for_all(store: Store) -> None:
    def slow() -> int:
        time.sleep(0.3)
        return 10

    unkept = node(one, task_id="u", checkpoint=False)
    first = node(add, unkept, task_id="a")
    second = node(add, unkept, node(slow, task_id="c"), task_id="b")
    drive(store, node(add, first, second, task_id="last"), "a")
    assert output(store, "r") == 12


def test_what_a_lost_value_was_made_of_is_made_again_though_it_was_let_go(store: Store) -> None:
    first = node(one, task_id="first", checkpoint=False)
    second = node(add, first, 1, task_id="second", checkpoint=False)
    third = node(add, second, first, task_id="third", checkpoint=False)
    drive(store, node(add, third, 1, task_id="kept"), "kept")
    assert output(store, "r") == 4
    steps = read_run(store, "r").steps
    assert [len(steps[name].attempts) for name in ("first", "second", "third", "kept")] == [2, 2, 2, 2]
