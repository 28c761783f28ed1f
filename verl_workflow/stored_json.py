"""JSON that others have written: whatever is wrong with it, it is one kind of error."""

from __future__ import annotations

import json
import sys
from typing import Any, TypeGuard


def parse_json(data: bytes | str) -> Any:
    """Read one JSON document. Raises ValueError for anything that is none, or is nested too deeply to be read."""
    try:
        return json.loads(data)
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error


def is_number(value: Any) -> TypeGuard[int | float]:
    """Whether this is a number to reckon with: finite, within what a float can hold, and no bool."""
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= sys.float_info.max
