from __future__ import annotations

import pytest

from verl_workflow.errors import ErrorCode, UserError
from verl_workflow.gates import GATE_NAMES, check_gate, evaluate_gate

FIRST = {"candidate": {"score": 0.34, "acc": 0.5, "format ok": 1.0}, "champion": None, "rows": 32}
SECOND = {"candidate": {"score": 0.81}, "champion": {"score": 0.34}, "rows": 32}


@pytest.mark.parametrize(
    ("gate", "first", "second"),
    [
        ("champion is None or candidate.score > champion.score", True, True),
        ("champion is not None and candidate.score > champion.score", False, True),
        ("candidate.score >= 0.5", False, True),
        ("not candidate.score >= 0.5", True, False),
        ("0.3 < candidate.score <= 0.34", True, False),
        ("candidate.score * 2 - 1 > -0.1 and rows == 32", False, True),
        ("round(candidate.score, 1) == 0.3", True, False),
        ("max(candidate.score, 0.4) == min(0.4, 1)", True, False),
        ("abs(candidate.score - 0.81) < 1e-9", False, True),
        ("rows // 10 == 3 and rows % 10 == 2 and rows / 64 == 0.5", True, True),
        ("True", True, True),
        ("\n  candidate.score\n    >= 0.5\n", False, True),
    ],
)
def test_a_gate_decides_over_the_figures(gate: str, first: bool, second: bool) -> None:
    check_gate(gate, GATE_NAMES)
    assert evaluate_gate(gate, FIRST) is first
    assert evaluate_gate(gate, SECOND) is second


def test_a_key_that_is_no_name_is_reached_by_brackets() -> None:
    assert evaluate_gate('candidate["format ok"] == 1', FIRST)


@pytest.mark.parametrize(
    "gate",
    [
        "",
        "   ",
        "candidate.score >",
        "candidate.score = 1",
        "x > 1) or (True",
        "x\0 > 1",
        "(" * 500 + "1" + ")" * 500,
        "1 < " * 1000 + "1",
        "not " * 400 + "True",
        "-" * 900 + "1 > 0",
        "__import__('os').system('true') == 0",
        "candidate.score.__class__.__mro__[0] is None",
        "(lambda: True)()",
        "[x for x in rows] == 1",
        "2 ** 9999 > 1",
        "rows << 3 > 1",
        "~rows > 1",
        "rows in (1, 2)",
        "rows is 32",
        "f'{rows}' == '32'",
        "(rows := 3) > 1",
        "max(*rows) > 1",
        "round(rows, ndigits=1) > 1",
        "min(1) > 0",
        "rows if True else False",
        "b'a' == b'a'",
        "1j == 1",
        "candidate[0] > 1",
    ],
)
def test_what_is_no_gate_is_refused_before_anything_runs(gate: str) -> None:
    with pytest.raises(UserError) as caught:
        check_gate(gate)
    assert caught.value.code is ErrorCode.GATE_INVALID


@pytest.mark.parametrize("gate", ["0.5", "rows - 1", "max(1, 2)", "-1", "rows > 1 and 2", "not 1", "None", "'yes'"])
def test_a_number_is_no_decision(gate: str) -> None:
    with pytest.raises(UserError, match="not true or false"):
        check_gate(gate)


@pytest.mark.parametrize("gate", ["candidate.score", "rows", "candidate.score > 0 and rows", "not champion"])
def test_a_figure_is_no_decision(gate: str) -> None:
    check_gate(gate)
    with pytest.raises(UserError, match="not true or false"):
        evaluate_gate(gate, FIRST)


def test_a_misspelt_name_is_found_before_anything_runs() -> None:
    with pytest.raises(UserError, match=r"no candidat, at column 14 .*Did you mean candidate\?"):
        check_gate("rows > 1 and candidat.score > 1", GATE_NAMES)
    check_gate("anything > max(1, 2)")


def test_a_missing_figure_names_the_ones_that_are_there() -> None:
    with pytest.raises(UserError, match=r"no candidate\.scor\b.*mean candidate\.score\?.*candidate\.acc") as caught:
        evaluate_gate("candidate.scor > 0.5", FIRST)
    assert caught.value.code is ErrorCode.GATE_INVALID
    with pytest.raises(UserError, match="no winner"):
        evaluate_gate("winner.score > 0.5", FIRST)


def test_none_is_named_and_the_guard_is_shown() -> None:
    with pytest.raises(UserError, match=r"champion is None and has no score.*champion is None or"):
        evaluate_gate("candidate.score > champion.score", FIRST)
    with pytest.raises(UserError, match="champion is None, where a number is needed"):
        evaluate_gate("candidate.score > champion", FIRST)
    with pytest.raises(UserError, match="x is None, where a number is needed"):
        evaluate_gate("x + 1 > 0", {"x": None})


@pytest.mark.parametrize("gate", ["x > 1", "not x < 1", "1 != x"])
def test_nan_never_decides(gate: str) -> None:
    with pytest.raises(UserError, match="x is NaN"):
        evaluate_gate(gate, {"x": float("nan")})


@pytest.mark.parametrize("gate", ["1 / zero > 1", "1 % zero > 1", "round(1.5, 0.5) > 1", "big * 1.0 > 1"])
def test_arithmetic_that_fails_is_told(gate: str) -> None:
    with pytest.raises(UserError, match="cannot be computed"):
        evaluate_gate(gate, {"zero": 0, "big": 10**400})


def test_text_compares_with_text_only() -> None:
    assert evaluate_gate("name == 'a' and name < 'b'", {"name": "a"})
    with pytest.raises(UserError, match="where a number is needed"):
        evaluate_gate("name < 1", {"name": "a"})
    with pytest.raises(UserError, match="where a number is needed"):
        evaluate_gate("name * 1000 == 'a'", {"name": "a"})
