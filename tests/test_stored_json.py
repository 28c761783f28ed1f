from __future__ import annotations

from typing import Any

import pytest

from verl_workflow.stored_json import is_number, parse_json


@pytest.mark.parametrize("data", [b"", b"{", b"\xff\xfe{", b"[" * 100_000, b'{"a":' * 100_000])
def test_whatever_is_wrong_with_json_is_a_value_error(data: bytes) -> None:
    with pytest.raises(ValueError, match=r"."):
        parse_json(data)


@pytest.mark.parametrize(
    ("value", "expected"),
    [(0, True), (-1.5, True), (True, False), ("1", False), (None, False), ([1], False)]
    + [(float(word), False) for word in ("nan", "inf", "-inf")]
    + [(10**400, False)],
)
def test_a_number_is_one_to_reckon_with(value: Any, expected: bool) -> None:
    assert is_number(value) is expected
