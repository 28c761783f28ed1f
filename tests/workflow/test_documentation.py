"""The examples of docs/workflow.md are run as they are printed there."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "docs" / "workflow.md").read_text()


def example(name: str) -> tuple[str, list[str]]:
    """A script of the page, and what the page says that it prints."""
    script = re.search(rf"`{name}`:\n\n<!-- runs in [^>]* -->\n```python\n(.*?)```", TEXT, re.DOTALL)
    printed = re.search(rf"\$ python {name}\n(.*?)```", TEXT, re.DOTALL)
    assert script and printed
    return script[1], printed[1].splitlines()


def run(folder: Path, name: str) -> list[str]:
    environment = {**os.environ, "TMPDIR": "/tmp", "PYTHONPATH": str(ROOT), "RAY_ADDRESS": "local"}
    done = subprocess.run(
        [sys.executable, name], cwd=folder, env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_the_first_example_prints_what_the_page_says_and_does_nothing_twice(tmp_path: Path) -> None:
    script, printed = example("trip.py")
    (tmp_path / "trip.py").write_text(script)
    assert run(tmp_path, "trip.py") == printed
    journal = sorted((tmp_path / "trips" / "runs" / "spring").glob("*/journal/*"))
    assert journal
    assert run(tmp_path, "trip.py") == printed
    assert sorted((tmp_path / "trips" / "runs" / "spring").glob("*/journal/*")) == journal


def test_the_example_of_events_continuations_and_forks_prints_what_the_page_says(tmp_path: Path) -> None:
    script, printed = example("approval.py")
    (tmp_path / "approval.py").write_text(script)
    assert run(tmp_path, "approval.py") == printed
