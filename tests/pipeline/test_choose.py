from __future__ import annotations

from typing import Any

import pytest

from verl_workflow.errors import ErrorCode, UserError, VerlWorkflowError
from verl_workflow.pipeline._choose import choose
from verl_workflow.pipeline._tolerance import stand_in
from verl_workflow.spec import ChooseStage, Pipeline, PythonStage
from verl_workflow.spec._stage import Member


def members(of: str, count: int) -> list[Any]:
    return [
        PythonStage(name=f"{of}-{number}", function="f.py:f", member=Member(of=of, values={"x": number}))
        for number in range(count)
    ]


def choice(results: list[Any], mode: Any = "max", by: str = "candidate.score", judged: Any = ()) -> dict[str, Any]:
    spec = ChooseStage(name="best", of="m", by=by, mode=mode)
    stages = [*members("m", len(results)), *members("judge", len(judged)), spec]
    values = {f"m-{number}": result for number, result in enumerate(results)}
    values |= {f"judge-{number}": result for number, result in enumerate(judged)}
    return choose(spec, Pipeline(name="p", stages=stages), values)


def scored(*figures: Any) -> list[Any]:
    return [
        {"model": f"model {number}", "candidate": {} if figure is None else {"score": figure}}
        for number, figure in enumerate(figures)
    ]


@pytest.mark.parametrize(
    ("figures", "mode", "winner"),
    [
        ([0.1, 0.9, 0.5], "max", 1),
        ([0.1, 0.9, 0.5], "min", 0),
        ([0.9, 0.9], "max", 0),
        ([0.9, 0.9], "min", 0),
        ([None, 0.1, float("nan"), True, "0.9"], "max", 1),
        ([None, 0.1, float("-inf"), False, "0.0"], "min", 1),
        ([-0.5, -0.1], "max", 1),
        ([0, None], "max", 0),
    ],
)
def test_the_best_number_wins(figures: list[Any], mode: str, winner: int) -> None:
    found = choice(scored(*figures), mode)
    assert found["winner"] == f"m-{winner}"
    assert found["model"] == f"model {winner}"
    assert found["values"] == {"x": winner}
    assert found["figure"] == figures[winner]
    assert [row["member"] for row in found["table"]] == [f"m-{number}" for number in range(len(figures))]
    usable = [isinstance(each, float | int) and not isinstance(each, bool) and abs(each) < 2 for each in figures]
    assert [row["figure"] is not None for row in found["table"]] == usable


def test_the_figure_may_be_of_another_stage_over_the_same_matrix() -> None:
    found = choice(scored(0.9, 0.1), by="${judge.acc}", judged=[{"acc": 0.2}, {"acc": 0.4}])
    assert (found["winner"], found["model"], found["figure"]) == ("m-1", "model 1", 0.4)


def test_a_member_that_failed_never_wins_and_says_why() -> None:
    failed = stand_in("m-0", {"code": "training_failed", "message": "the training failed (numeric)"})
    found = choice([failed, *scored(0.1)])
    assert found["winner"] == "m-1"
    assert found["table"][0] == {
        "member": "m-0",
        "values": {"x": 0},
        "figure": None,
        "error": "the training failed (numeric)",
    }


def test_a_member_whose_judge_failed_never_wins() -> None:
    failed = stand_in("judge-0", {"message": "no rows"})
    found = choice(scored(0.9, 0.1), by="${judge.acc}", judged=[failed, {"acc": 0.0}])
    assert (found["winner"], found["table"][0]["error"]) == ("m-1", "no rows")


def test_without_any_number_the_figures_that_are_there_are_named() -> None:
    results = [{"reward": {"first": 0.1, "last": None}, "step": 4, "model": {"sha256": "x", "bytes": 1}}] * 2
    with pytest.raises(UserError) as caught:
        choice(results, by="reward.last")
    assert str(caught.value) == (
        "best.by: no member has a finite number at reward.last (got 'reward.last'). "
        "Figures of the first member: reward.first, step."
    )


def test_when_all_have_failed_the_first_says_why() -> None:
    failed = [stand_in(f"m-{number}", {"message": f"broken {number}"}) for number in range(2)]
    with pytest.raises(VerlWorkflowError, match="all 2 members have failed") as caught:
        choice(failed)
    assert (caught.value.code, caught.value.retryable) == (ErrorCode.STEP_FAILED, False)
    assert "broken 0" in caught.value.remedy
