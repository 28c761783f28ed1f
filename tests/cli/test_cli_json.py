from __future__ import annotations

import json
from typing import Any

import pytest

from verl_workflow.cli._json import json_parts
from verl_workflow.cli._words import short


@pytest.mark.parametrize("indent", ["", "  "])
@pytest.mark.parametrize(
    "document",
    [None, True, 1.5, "größe ✓", [], {}, [[], {}], {"a": [1, {"b": None}], "c": "\n"}, (1, 2), {"a": "\ud800"}],
)
def test_it_is_what_json_dumps_writes(document: Any, indent: str) -> None:
    ascii_only = "\\ud" in json.dumps(document)
    expected = json.dumps(document, indent=indent or None, ensure_ascii=ascii_only)
    assert "".join(json_parts(document, indent=indent)) == expected


def test_numbers_that_json_cannot_hold_become_null() -> None:
    assert "".join(json_parts([float("nan"), float("inf"), 1.0])) == "[null, null, 1.0]"


def test_texts_are_escaped_only_where_the_encoding_lacks_them() -> None:
    assert "".join(json_parts(["ü", "✓", "😀"], encoding="latin-1")) == '["ü", "\\u2713", "\\ud83d\\ude00"]'


def test_no_depth_is_too_much() -> None:
    deep: Any = 1
    for _ in range(50_000):
        deep = [deep]
    assert "".join(json_parts(deep)) == "[" * 50_000 + "1" + "]" * 50_000
    assert short(deep) == "[" * 99 + "…"
