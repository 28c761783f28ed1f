"""A pattern in an error or a log that shows a class of failure."""

from __future__ import annotations

import re
from dataclasses import dataclass

from verl_workflow.spec._failure_class import FailureClass


@dataclass(frozen=True, kw_only=True)
class Rule:
    """A pattern that shows a class.

    Attributes:
        advice: what helps here in particular; empty: what helps against the class.
        weak: whether a stronger sign elsewhere wins, since this may be only what followed from it.
        preempted: whether a node was taken away on notice.
    """

    kind: FailureClass
    pattern: re.Pattern[str]
    advice: str = ""
    weak: bool = False
    preempted: bool = False


def rule(
    kind: FailureClass, pattern: str, advice: str = "", *, weak: bool = False, preempted: bool = False, flags: int = 0
) -> Rule:
    """A rule whose pattern is compiled with the flags of `re`."""
    return Rule(kind=kind, pattern=re.compile(pattern, flags), advice=advice, weak=weak, preempted=preempted)
