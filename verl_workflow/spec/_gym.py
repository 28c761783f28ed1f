"""What can be known of reasoning-gym's data sets without importing it, which takes seconds."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

_NAME = re.compile(r"""DATASET_NAME\s*=\s*["']([^"'\n]+)["']""")


def unknown_dataset(name: str) -> list[str] | None:
    """The names like those of the package's data sets when it surely has none called `name`, else None.

    A data set is registered under a literal name: one that stands nowhere in the package's sources is not there. When
    the package is not installed, or keeps no sources, nothing is sure.
    """
    sources = _sources()
    if not sources or any(f"{quote}{name}{quote}" in text for text in sources for quote in "\"'"):
        return None
    return sorted({found for text in sources for found in _NAME.findall(text)})


@cache
def _sources() -> tuple[str, ...]:
    return tuple(_read())


def _read() -> Iterator[str]:
    spec = importlib.util.find_spec("reasoning_gym")
    for folder in (spec.submodule_search_locations or []) if spec is not None else []:
        for file in sorted(Path(folder).rglob("*.py")):
            yield file.read_text(encoding="utf-8", errors="replace")
