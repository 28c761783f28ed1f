"""A pipeline as it is written, right or wrong: what is checked, and what a matrix makes many of."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from verl_workflow.spec._fields import REFERENCE, FieldPath
from verl_workflow.spec._model import CLASSES, Head


@dataclass(frozen=True, kw_only=True)
class Part:
    """A stage as it is written, or one member of it when a matrix makes it many.

    Attributes:
        name: as it is written. kind: None when it is not known. path: where it stands.
        body: plain data; what does not have the right type is passed over here, for it is told elsewhere.
        member: name of the step that this member becomes; None when the stage is one.
        values: the member's combination. root: the stage whose matrix it is.
        moved: fields whose value stands elsewhere in the file: path in the body -> where that is.
        renames: stages that have a member of the same combination, by the name of that.
    """

    name: str
    kind: str | None
    path: FieldPath
    body: Mapping[str, Any]
    member: str | None = None
    values: Mapping[str, Any] = field(default_factory=dict)
    root: str | None = None
    moved: Mapping[FieldPath, FieldPath] = field(default_factory=dict)
    renames: Mapping[str, str] = field(default_factory=dict)

    @property
    def of(self) -> str:
        """The stage that this is, or is a member of; also in a pipeline that was written down with its members."""
        made = self.body.get("member")
        named = made.get("of") if isinstance(made, Mapping) else None
        return named if isinstance(named, str) else self.name

    def at(self, path: FieldPath) -> FieldPath:
        """Where a field's value stands in the file."""
        for length in range(len(path), 0, -1):
            if path[:length] in self.moved:
                return (*self.moved[path[:length]], *path[length:])
        return (*self.path, *path)

    def inputs(self) -> Iterator[tuple[FieldPath, str]]:
        """All texts in fields that may hold references."""
        model = CLASSES.get(self.kind or "")
        for field_name in model.INPUTS if model is not None else ():
            default = model.model_fields[field_name].default  # type: ignore[union-attr]
            yield from texts_in(self.body.get(field_name, default), (field_name,))

    def after(self) -> Iterator[tuple[FieldPath, str]]:
        """The names in `after`."""
        names = self.body.get("after")
        yield from ((path, name) for path, name in texts_in(names, ("after",)) if len(path) == 2)

    def edges(self) -> dict[str, FieldPath]:
        """The stages this one names, each with the field that does."""
        found: dict[str, FieldPath] = {}
        chosen = self.body.get("of") if self.kind == "choose" else None
        if isinstance(chosen, str):
            found[chosen] = ("of",)
        for path, text in self.inputs():
            for match in REFERENCE.finditer(text):
                found.setdefault(match.group(1), path)
        for path, name in self.after():
            found.setdefault(name, path)
        return found


@dataclass(frozen=True, kw_only=True)
class Draft:
    """A pipeline that may have mistakes. Attributes: has_model says whether `model` is written down, right or wrong."""

    head: Head | None
    has_model: bool
    parts: Sequence[Part]


def texts_in(value: Any, path: FieldPath = ()) -> Iterator[tuple[FieldPath, str]]:
    if isinstance(value, str):
        yield path, value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from texts_in(item, (*path, key))
    elif isinstance(value, list):
        for index, item in enumerate(value):
            yield from texts_in(item, (*path, index))
