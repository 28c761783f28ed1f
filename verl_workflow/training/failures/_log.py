"""What a log says: its lines without decoration, where the training last moved, and what the user's code raised."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

_COLOUR = re.compile(r"\x1b\[[0-9;]*m")
# What Ray and vLLM put before a line to say whose it is, and what Ray puts behind lines that it has left out.
_WORKER = re.compile(r"^(\([^()]*pid=\d+[^()]*\) ?)+")
_VLLM = re.compile(r"^(ERROR|CRITICAL) \d\d-\d\d [\d:]+ (\[[\w./]+:\d+\] ?)?")
_REPEATED = re.compile(r" \[repeated \d+x across cluster\].*$")
# Ray says of each process and node that died what else it might have died of, and counts deaths of each kind.
_GUESSES = re.compile(r"(Some common causes include|There are some potential root causes|This can happen if).*")
_NONE_OF_THEM = re.compile(r"\b0 Workers \(tasks / actors\) killed due to memory pressure \(OOM\)[^,]*, ")
# A line of verl's configuration, which it prints at each start, or a warning: both name what has not happened.
_SAYS_NOTHING = re.compile(
    r"^\s*[\[{]*'[^']*': |^ray init kwargs:|\b\w*Warning: |^(\[rank\d+\]:)?\[W\d* |^WARN(ING)?\b(?!.*\bNCCL WARN)|"
    r"^\(raylet[^)]*\) \[[^\]]* W [\d ]+\]|file_system_monitor\.cc"
)
# What verl prints of a step that it has finished.
_STEP = re.compile(r"^step:\d+ - ")
# The line that ends a traceback, for between its lines others may stand.
_RAISED = re.compile(r"^(?!(DEBUG|INFO|WARN|WARNING|ERROR|CRITICAL)\b)[A-Za-z_][\w.]*(:\s|$)")

_LOST_ANSWER = re.compile(r"\bError in _run_prompt\b")


@dataclass(frozen=True, kw_only=True)
class Raised:
    """An exception that the user's code let go: where, the line that names it, and that line's place in the log."""

    where: str
    error: str
    place: int


def plain(line: str) -> str:
    """A log's line without colours, the worker that is named before it, and what Ray only guesses at."""
    text = _VLLM.sub("", _WORKER.sub("", _COLOUR.sub("", line)))
    return _GUESSES.sub("", _NONE_OF_THEM.sub("", _REPEATED.sub("", text))).rstrip()


def says_something(line: str) -> bool:
    """Whether a plain line may tell of a failure."""
    return _SAYS_NOTHING.search(line) is None


def steps(lines: Sequence[str]) -> list[int]:
    """Places of the plain lines that tell of a finished step: what went wrong before the last one was survived."""
    return [place for place, line in enumerate(lines) if _STEP.match(line)]


def lost_answer(lines: Sequence[str]) -> str | None:
    """The first exception by which verl has lost an answer, which it only logs; it fails later for want of answers.

    Args:
        lines: of a log with tracebacks, plain.
    """
    lost = False
    for line in lines:
        lost = lost or _LOST_ANSWER.search(line) is not None
        if lost and _RAISED.match(line):
            return line.strip()
    return None


def raised_by_user(lines: Sequence[str], code_dir: Path) -> Raised | None:
    """The last exception that came from a file below `code_dir`.

    verl counts an answer whose reward raised as lost, and fails later for want of answers: the cause is in its log.

    Args:
        lines: of a log with tracebacks, plain.
    """
    frame = re.compile(rf'File "{re.escape(str(code_dir))}/([^"]+)", line (\d+), in (\S+)')
    where: str | None = None
    found: Raised | None = None
    for place, line in enumerate(lines):
        if (match := frame.search(line)) is not None:
            where = f"{match[1]}:{match[2]} in {match[3]}"
        elif where is not None and _RAISED.match(line):
            found, where = Raised(where=where, error=line.strip(), place=place), None
    return found
