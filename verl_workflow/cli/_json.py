"""JSON of any depth, piece by piece: `json.dumps` recurses, and values may be as deep as JSON can be read."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any


def json_parts(document: Any, *, indent: str = "", encoding: str = "utf-8") -> Iterator[str]:
    """The pieces of one JSON document; numbers that JSON cannot hold become null.

    Args:
        indent: of each further level; empty for one line.
        encoding: texts that it lacks characters for are written with JSON's escapes, all others as they are.

    Raises:
        TypeError: something in the document has no JSON form.
    """
    left: list[tuple[Any, int]] = [(document, 0)]
    while left:
        value, depth = left.pop()
        if isinstance(value, _Written):
            yield value.text
        elif isinstance(value, str):
            yield _text(value, encoding)
        elif isinstance(value, Mapping):
            entries = [(f"{_text(str(key), encoding)}: ", item) for key, item in value.items()]
            left.extend(_framed("{", entries, "}", depth, indent))
        elif isinstance(value, (list, tuple)):
            left.extend(_framed("[", [("", item) for item in value], "]", depth, indent))
        elif isinstance(value, float) and not math.isfinite(value):
            yield "null"
        else:
            yield json.dumps(value)


@dataclass(frozen=True)
class _Written:
    """A piece that needs no more work."""

    text: str


def _framed(start: str, entries: list[tuple[str, Any]], end: str, depth: int, indent: str) -> list[tuple[Any, int]]:
    """An object or array as pieces and what is yet to be written, last one first."""
    if not entries:
        return [(_Written(start + end), depth)]
    inner, outer = (f"\n{indent * (depth + 1)}", f"\n{indent * depth}") if indent else ("", "")
    between = "," if indent else ", "
    found: list[tuple[Any, int]] = []
    for number, (label, item) in enumerate(entries):
        found += [(_Written(f"{between if number else start}{inner}{label}"), depth), (item, depth + 1)]
    found.append((_Written(f"{outer}{end}"), depth))
    return found[::-1]


def _text(text: str, encoding: str) -> str:
    written = json.dumps(text, ensure_ascii=False)
    if _fits(written, encoding):
        return written
    return "".join(each if _fits(each, encoding) else json.dumps(each)[1:-1] for each in written)


def _fits(text: str, encoding: str) -> bool:
    try:
        text.encode(encoding)
    except UnicodeEncodeError:
        return False
    return True
