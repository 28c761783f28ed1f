from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from verl_airflow._log_cursor import LogCursor


@given(st.text(alphabet="ab\n\u2028"), st.lists(st.integers(0, 40)))
def test_each_line_is_told_once_however_the_log_grows(text: str, lengths: list[int]) -> None:
    cursor = LogCursor()
    told: list[str] = []
    for length in sorted(lengths):
        told += cursor.advance(text[:length])
    told += cursor.advance(text, ended=True)
    assert told == (text.removesuffix("\n").split("\n") if text else [])


def test_a_line_is_told_when_it_is_whole() -> None:
    cursor = LogCursor()
    assert cursor.advance("one\ntw") == ["one"]
    assert cursor.advance("one\ntwo\n") == ["two"]


def test_a_log_that_is_gone_tells_nothing_twice() -> None:
    cursor = LogCursor()
    cursor.advance("one\n")
    assert cursor.advance("") == []
    assert cursor.advance("one\ntwo\n") == ["two"]
