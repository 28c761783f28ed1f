"""The example of docs/workflow.md is run as it is printed there."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "docs" / "workflow.md").read_text()


def run(folder: Path) -> list[str]:
    environment = {**os.environ, "TMPDIR": "/tmp", "PYTHONPATH": str(ROOT), "RAY_ADDRESS": "local"}
    done = subprocess.run(
        [sys.executable, "trip.py"], cwd=folder, env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_the_example_prints_what_the_page_says_and_does_nothing_twice(tmp_path: Path) -> None:
    script = re.search(r"<!-- runs in [^>]* -->\n```python\n(.*?)```", TEXT, re.DOTALL)
    printed = re.search(r"\$ python trip\.py\n(.*?)```", TEXT, re.DOTALL)
    assert script and printed
    (tmp_path / "trip.py").write_text(script[1])
    assert run(tmp_path) == printed[1].splitlines()
    journal = sorted((tmp_path / "trips" / "runs" / "spring").glob("*/journal/*"))
    assert journal
    assert run(tmp_path) == printed[1].splitlines()
    assert sorted((tmp_path / "trips" / "runs" / "spring").glob("*/journal/*")) == journal
