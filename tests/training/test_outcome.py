"""How an attempt's failure is told."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

from verl_workflow.spec import FailureClass
from verl_workflow.spec._supervision import Guard
from verl_workflow.training._guards import Alarm
from verl_workflow.training._metrics import Row, non_finite
from verl_workflow.training._outcome import AttemptFailed, alarmed, as_error
from verl_workflow.training._retry import Decision
from verl_workflow.training.failures import Failure

DEAD = {"actor/grad_norm": None, "actor/pg_loss": None}


def of_guard(data: dict[str, Any]) -> Failure:
    names = ", ".join(non_finite(Row(step=3, data=data)))
    alarm = Alarm(guard=Guard(non_finite=True), what=f"{names} are not finite at step 3", since=3)
    return alarmed(alarm).failure


def test_numbers_that_are_none_are_the_rewards_when_it_gives_none() -> None:
    assert of_guard(DEAD).kind is FailureClass.NUMERIC
    found = of_guard({**DEAD, "critic/score/mean": None})
    assert found.kind is FailureClass.REWARD
    assert "critic/score/mean, actor/grad_norm" in found.what
    assert "The reward gave a number that is none" in found.advice
    assert of_guard({**DEAD, "critic/score/mean": 0.5}).kind is FailureClass.NUMERIC


def test_the_last_words_end_before_those_of_the_stop_itself(tmp_path: Path) -> None:
    log = tmp_path / "log.txt"
    log.write_text("step 3\nthe last of it\n*** SIGTERM received at time=17 on cpu 1 ***\nPC: @ 0x7f (unknown)\n")
    attempt: Any = SimpleNamespace(log=log, ctx=SimpleNamespace(stage="train"), newest=lambda: None)
    failure = Failure(kind=FailureClass.STALL, what="it stands still", evidence=("x",), advice="Look.")
    told = str(as_error(attempt, AttemptFailed(failure), Decision(again=False, why="No more.")))
    assert told.endswith("step 3\nthe last of it")
