"""The stage that chooses among the members of a matrix."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar, Literal

from verl_workflow.spec._fields import FieldPath, Input, Name
from verl_workflow.spec._stage import BaseStage


class ChooseStage(BaseStage):
    """Chooses the best member of a matrix and hands its outputs on, and with them ``winner`` (its name), ``values``
    (its combination), ``figure``, and ``table`` (all members with their values and figures).

    Attributes:
        of: the stage with the matrix.
        by: a figure of each member: dotted in its outputs, such as ``reward.last``, or of a stage over the same matrix,
            such as ``${evaluate.candidate.score}``. One that is missing or no finite number never wins; of equal ones
            the first member's does.
        mode: whether the largest figure wins or the smallest.
    """

    INPUTS: ClassVar[tuple[str, ...]] = ("by",)

    kind: Literal["choose"] = "choose"
    of: Name
    by: Input
    mode: Literal["max", "min"] = "max"

    def references(self) -> Iterator[tuple[FieldPath, str, str | None]]:
        yield ("of",), self.of, None
        yield from super().references()
