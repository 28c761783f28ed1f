"""What the classes of a pipeline are built from: field types, the strict base class, and references.

A reference is ``${stage.output}``, ``${stage}`` or ``${model}``; ``${params.name}`` and ``${matrix.name}`` are some
until they are given their values.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from typing import Annotated, Any

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Discriminator,
    Field,
    StringConstraints,
    Tag,
    ValidatorFunctionWrapHandler,
    field_validator,
)

FieldPath = tuple[str | int, ...]

NAME_PATTERN = r"^[A-Za-z_][A-Za-z0-9_-]{0,63}\Z"
FUNCTION_PATTERN = r"^[^:\s]+:[A-Za-z_]\w*\Z"
# Lists and mappings in each other; what writes a run's definition takes no more than about 250.
DEPTH = 100
REFERENCE = re.compile(r"\$\{([A-Za-z_][\w-]*)(?:\.([A-Za-z_][\w.-]*))?\}")

_PUT_IN = re.compile(r"\$\{(?:params|matrix)\.")


def is_nested_too_deeply(value: Any) -> bool:
    """Whether lists and mappings lie more than `DEPTH` deep in each other."""
    level = [value]
    for _ in range(DEPTH + 1):
        inner = [list(item.values()) if isinstance(item, Mapping) else item for item in level]
        level = [each for item in inner if isinstance(item, (list, tuple)) for each in item]
        level = [each for each in level if isinstance(each, (Mapping, list, tuple))]
        if not level:
            return False
    return True


def _json(value: Any) -> Any:
    if is_nested_too_deeply(value):
        raise ValueError(f"is nested more than {DEPTH} deep")
    try:
        json.dumps(value, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise ValueError(f"holds what JSON cannot: {error}") from error
    return value


def _schedulable(amount: float) -> float:
    if 0 < amount < 0.0001:
        raise ValueError("Ray hands out no less than 0.0001: give 0, or 0.0001 or more")
    return amount


def _whole_above_one(amount: float) -> float:
    if amount > 1 and amount != int(amount):
        raise ValueError("Ray hands out shares of one GPU, or whole ones: give 1 or less, or a whole number")
    return amount


def shape(value: Any) -> str:
    """Which of the forms of a field is meant: ``mapping``, ``list`` or ``plain``."""
    if isinstance(value, (Mapping, BaseModel)):
        return "mapping"
    return "list" if isinstance(value, list) else "plain"


Name = Annotated[str, StringConstraints(pattern=NAME_PATTERN)]
Input = Annotated[str, StringConstraints(min_length=1)]
Function = Annotated[str, StringConstraints(pattern=FUNCTION_PATTERN)]
Cpus = Annotated[float, Field(ge=0), AfterValidator(_schedulable)]
Gpus = Annotated[float, Field(ge=0), AfterValidator(_schedulable), AfterValidator(_whole_above_one)]
# Values that end up in the run's definition, which is JSON.
Json = Annotated[Any, AfterValidator(_json)]
JsonObject = Annotated[dict[str, Any], AfterValidator(_json)]
Inputs = Annotated[
    Annotated[Input, Tag("plain")]
    | Annotated[Annotated[list[Input], Field(min_length=1)], Tag("list")]
    | Annotated[Input, Tag("mapping")],
    Discriminator(shape),
]


class Strict(BaseModel):
    """No conversions: what is written is what runs. A text with ``${params.x}`` or ``${matrix.x}`` stands for any
    value until `load` or `resolve` puts the param's or the matrix's value in, and checks that.
    """

    model_config = ConfigDict(
        extra="forbid", frozen=True, strict=True, allow_inf_nan=False, validate_default=True, regex_engine="python-re"
    )

    @field_validator("*", mode="wrap")
    @classmethod
    def _params_stand_for_values(cls, value: Any, handler: ValidatorFunctionWrapHandler) -> Any:
        return value if isinstance(value, str) and _PUT_IN.search(value) else handler(value)


def references_in(value: Any, path: FieldPath) -> Iterator[tuple[FieldPath, str, str | None]]:
    """Each reference in a value: where it stands, the name it begins with, and what comes after the dot."""
    if isinstance(value, str):
        for match in REFERENCE.finditer(value):
            yield path, match.group(1), match.group(2)
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from references_in(item, (*path, key))
    elif isinstance(value, list):
        for index, item in enumerate(value):
            yield from references_in(item, (*path, index))
