"""What all stages have in common."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, ClassVar, Literal

from pydantic import Discriminator, Field, PositiveInt, Tag

from verl_workflow.spec._fields import FieldPath, Json, JsonObject, Name, Strict, references_in, shape


class Retry(Strict):
    """How often a stage is tried in all when it fails for a reason that may pass."""

    attempts: PositiveInt = 3
    backoff: Annotated[float, Field(ge=0)] = 2.0


class BaseStage(Strict):
    # Fields that may hold references: their outputs must exist before the stage runs. Anywhere else ``${...}`` is text
    # (in `overrides` it is verl's own interpolation).
    INPUTS: ClassVar[tuple[str, ...]] = ()

    name: Name
    after: list[Name] = []
    retry: Retry = Retry()
    timeout: Annotated[float, Field(gt=0)] | None = None

    def references(self) -> Iterator[tuple[FieldPath, str, str | None]]:
        """All references in the stage's inputs: (path of the field, stage name, output or None)."""
        fields = self.model_dump(mode="json", include=set(self.INPUTS), warnings=False)
        for field in self.INPUTS:
            yield from references_in(fields[field], (field,))

    def needs(self) -> frozenset[str]:
        """Names of the stages that must have succeeded first."""
        named = {stage for _, stage, _ in self.references() if stage not in {"model", "params", "matrix"}}
        return frozenset(named | set(self.after))


class Member(Strict):
    """Which of the stages that a matrix has made this is; `load` writes it, nobody else has to.

    Attributes:
        of: name of the stage with the matrix. values: its combination.
    """

    of: Name
    values: JsonObject


Matrix = Annotated[
    Annotated[Name, Tag("plain")]
    | Annotated[Name, Tag("list")]
    | Annotated[Annotated[dict[Name, Annotated[list[Json], Field(min_length=1)]], Field(min_length=1)], Tag("mapping")],
    Discriminator(shape),
]


class MatrixStage(BaseStage):
    """A stage that a matrix can make many of: one for each combination of its values, ``train-1``, ``train-2``, ...

    Attributes:
        matrix: values by name, put where ``${matrix.name}`` stands in the stage; or the name of a stage with a matrix,
            for one stage for each member of that: ``${train.model}`` is then that member's.
        exclude: combinations, or parts of some, that are left out.
        failures: ``fail``: a member that fails for good fails the run; ``tolerate``: the others go on without it.
        member: which member this is; not to be written by hand.
    """

    matrix: Matrix | None = None
    exclude: list[JsonObject] = []
    failures: Literal["fail", "tolerate"] = "fail"
    member: Member | None = None
