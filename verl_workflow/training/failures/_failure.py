"""A failure of a training as it is recorded and told."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from verl_workflow.spec._failure_class import FailureClass


@dataclass(frozen=True, kw_only=True)
class Failure:
    """Why an attempt ended without success.

    Attributes:
        kind: its class.
        what: one line, for example ``OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB``.
        evidence: the lines it was judged by, as they were written, most telling first; at most five.
        advice: what to do about it, in sentences.
        preempted: whether a node was taken away on notice, which costs no attempt.
        final: whether another attempt is of no use, whatever the class says.
    """

    kind: FailureClass
    what: str
    evidence: tuple[str, ...] = ()
    advice: str = ""
    preempted: bool = False
    final: bool = False

    def to_json(self) -> dict[str, Any]:
        """Plain JSON; `from_json` reads it."""
        return {
            "class": self.kind.value,
            "what": self.what,
            "evidence": list(self.evidence),
            "advice": self.advice,
            "preempted": self.preempted,
            "final": self.final,
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Failure:
        """The failure behind what `to_json` gave; ValueError or KeyError when it is none."""
        return cls(
            kind=FailureClass(data["class"]),
            what=str(data["what"]),
            evidence=tuple(str(line) for line in data["evidence"]),
            advice=str(data["advice"]),
            preempted=bool(data["preempted"]),
            final=bool(data["final"]),
        )
