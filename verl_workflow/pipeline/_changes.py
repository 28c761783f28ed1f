"""What of a stage has changed since an earlier run, as far as the two definitions tell."""

from __future__ import annotations

import reprlib
from collections.abc import Mapping
from typing import Any

from verl_workflow.pipeline._compile import spec_in_key
from verl_workflow.pipeline._definition import Definition

_MISSING = object()
_SHOWN = 4


def changes(now: Definition, before: Definition, stage: str) -> str:
    """A clause: which settings of the stage, files of code and tools differ; empty when none does.

    What the stage gets from others may differ all the same, and so may files outside of the pipeline's folder.
    """
    earlier = next((each for each in before.pipeline.stages if each.name == stage), None)
    if earlier is None:
        return "there was no such stage"
    found = _settings(spec_in_key(earlier), spec_in_key(now.pipeline.stage(stage)))
    if now.code_digest != before.code_digest:
        found += _files(before.code_files, now.code_files)
    for tool in sorted({*before.versions, *now.versions}):
        old, new = (each.get(tool, "not installed") for each in (before.versions, now.versions))
        if old != new:
            found.append(f"{tool} {old} -> {new}")
    if len(found) > _SHOWN:
        found[_SHOWN:] = [f"{len(found) - _SHOWN} more"]
    return ", ".join(found)


def _settings(old: Mapping[str, Any], new: Mapping[str, Any], above: str = "") -> list[str]:
    found = []
    for key in [*new, *(key for key in old if key not in new)]:
        before, after = old.get(key, _MISSING), new.get(key, _MISSING)
        if isinstance(before, Mapping) and isinstance(after, Mapping):
            found += _settings(before, after, f"{above}{key}.")
        elif before != after:
            found.append(f"{above}{key} {_shown(before)} -> {_shown(after)}")
    return found


def _shown(value: Any) -> str:
    if value is _MISSING or value is None:
        return "none"
    return reprlib.repr(value) if not isinstance(value, str) else reprlib.repr(value)[1:-1]


def _files(old: Mapping[str, str], new: Mapping[str, str]) -> list[str]:
    changed = [f"{name} changed" for name in sorted(old.keys() & new.keys()) if old[name] != new[name]]
    return (
        changed
        + [f"{name} added" for name in sorted(new.keys() - old.keys())]
        + [f"{name} removed" for name in sorted(old.keys() - new.keys())]
    )
