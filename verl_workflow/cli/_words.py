"""Figures as people read them."""

from __future__ import annotations

import math
import shlex
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote, urlparse

from verl_workflow.cli._json import json_parts
from verl_workflow.cli._options import DEFAULT_STORAGE
from verl_workflow.stored_json import is_number

if TYPE_CHECKING:
    from verl_workflow.cli._facts import RunFacts

_SHORT_VALUE = 30


def duration(seconds: float | None) -> str:
    """``0:07``, ``12:34``, ``1:02:03``, ``2d 03:04:05``; a dash when it is not known."""
    if seconds is None or not math.isfinite(seconds):
        return "-"
    whole = max(0, int(seconds + 0.5))
    days, rest = divmod(whole, 86400)
    hours, rest = divmod(rest, 3600)
    minutes, rest = divmod(rest, 60)
    if days:
        return f"{days}d {hours:02}:{minutes:02}:{rest:02}"
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def moment(unix: float | None) -> str:
    """A point in time in this machine's zone; a dash when there is none."""
    return "-" if unix is None else time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(unix))


def liveness(facts: RunFacts) -> str:
    """Who drives a run, and when it was last heard of."""
    if facts.status == "pending":
        return "driver: none has taken the run yet"
    owner = facts.owner or {}
    who = f"process {owner.get('pid')} on {owner.get('host')}"
    seen = f"last sign of life {duration(facts.heartbeat_age)} ago" if facts.heartbeat_age is not None else ""
    if facts.status == "resumable":
        return f"driver: gone ({', '.join(part for part in (who, seen) if part)})"
    stopping = ", asked to stop" if facts.cancel_requested else ""
    return f"driver: {who}{f', {seen}' if seen else ''}{stopping}"


def figure(value: Any) -> str:
    """A score with three decimals; a dash when there is none."""
    return f"{value:.3f}" if is_number(value) else "-"


def pace(seconds: float | None) -> str:
    """Seconds a step, or steps a second when they are quicker than that."""
    if not seconds or not math.isfinite(seconds):
        return "-"
    return f"{seconds:.1f} s/step" if seconds >= 1 else f"{1 / seconds:.1f} step/s"


def with_values(name: str, values: Mapping[str, Any]) -> str:
    """A stage's name, and the combination of a matrix that it stands for: ``train-2 learning_rate=0.005``."""
    return " ".join([name, *(f"{key}={short(value, _SHORT_VALUE)}" for key, value in values.items())])


def short(value: Any, limit: int = 100) -> str:
    """A value as one line of JSON, cut at `limit` characters."""
    text = ""
    for part in json_parts(value):
        text += part
        if len(text) > limit:
            return text[: limit - 1] + "…"
    return text


def location(storage: str) -> str:
    """The storage as one would type it: a plain path when it is local."""
    parsed = urlparse(storage)
    return unquote(parsed.path) if parsed.scheme == "file" else storage


def command(verb: str, run_id: str, storage: str, *more: str) -> str:
    """A command line for this run that can be pasted; the storage is left out when it is the default one."""
    return shlex.join(["verl-workflow", verb, run_id, *more, *_in_storage(storage)])


def run_anew(source: str, storage: str) -> str:
    """A command line that starts a new run of a pipeline's file in the same storage."""
    return shlex.join(["verl-workflow", "run", source, *_in_storage(storage)])


def _in_storage(storage: str) -> list[str]:
    from verl_workflow.storage import absolute_uri

    return [] if storage == absolute_uri(DEFAULT_STORAGE) else ["--storage", location(storage)]
