from __future__ import annotations

from pathlib import Path

import pytest

STEPS = """
from sums import add


def numbers(count, context):
    open("relative.txt", "w").close()
    print("wrote", count, "numbers")
    (context.attempt_dir / "numbers.txt").write_text(" ".join(map(str, range(count))))
    return {"path": str(context.attempt_dir / "numbers.txt"), "count": count}


def total(path, extra=0):
    with open(path) as stream:
        return {"total": add([int(word) for word in stream.read().split()]) + extra}


def unserialisable():
    return {"value": object()}
"""

PIPELINE = """
version: 1
name: sums
params:
  count: {type: integer, default: 4, minimum: 1}
stages:
  numbers:
    kind: python
    function: steps.py:numbers
    args: {count: "${params.count}"}
  total:
    kind: python
    function: steps.py:total
    args: {path: "${numbers.path}", extra: 10}
"""


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A folder with a pipeline of two Python stages whose code spans two files."""
    folder = tmp_path / "project"
    folder.mkdir()
    (folder / "steps.py").write_text(STEPS)
    (folder / "sums.py").write_text("def add(numbers):\n    return sum(numbers)\n")
    (folder / "pipeline.yaml").write_text(PIPELINE)
    return folder
