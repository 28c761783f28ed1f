"""From a stage with a matrix to its members: one stage for each combination of the matrix's values."""

from __future__ import annotations

import itertools
import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from verl_workflow.errors import ErrorCode, UserError
from verl_workflow.spec._draft import Part, texts_in
from verl_workflow.spec._fields import NAME_PATTERN, FieldPath
from verl_workflow.spec._model import CLASSES
from verl_workflow.spec._words import did_you_mean, label
from verl_workflow.spec._yaml import Places

MOST_MEMBERS = 64
# Before any is left out.
_MOST_LOOKED_AT = 4096
# Fields of a stage that say which members it has; they have none of their own.
OWN_FIELDS = frozenset({"matrix", "exclude"})
_REFERENCE = re.compile(r"\$\{matrix(?:\.([^}]*))?\}")


def expand(parts: Sequence[Part], places: Places) -> tuple[list[Part], list[UserError]]:
    """All parts, with those that have a matrix replaced by their members, and the mistakes in matrices.

    A member is called ``<stage>-<n>``, by its place among the combinations: the first name of a matrix changes slowest.
    """
    expansion = _Expansion(parts={part.name: part for part in parts}, places=places)
    found = [member for part in parts for member in expansion.members_of(part)]
    return found, expansion.errors


def has_matrix(part: Part) -> bool:
    """Whether a matrix is written in the stage, right or wrong."""
    return part.kind is not None and "matrix" in CLASSES[part.kind].model_fields and part.body.get("matrix") is not None


@dataclass(frozen=True, kw_only=True)
class _Combination:
    """Values by name, and where each is written."""

    values: Mapping[str, Any]
    places: Mapping[str, FieldPath]


@dataclass
class _Expansion:
    parts: Mapping[str, Part]
    places: Places
    errors: list[UserError] = field(default_factory=list)
    _known: dict[str, list[_Combination]] = field(default_factory=dict)

    def members_of(self, part: Part) -> Iterator[Part]:
        """The part itself when it has no matrix, or one that cannot be understood."""
        if not has_matrix(part):
            self._stray(part)
            yield part
            return
        root = self._root(part)
        combinations = self._combinations(root) if root is not None else []
        if root is None or not combinations:
            yield part
            return
        if part is not root and part.body.get("exclude"):
            what, remedy = f"the combinations are those of {root.name}", f"Leave them out there: in {root.name}."
            self._told(part, ("exclude",), what, None, remedy, key=True)
        self._check_uses(part, combinations[0], root)
        self._check_names(part, len(combinations))
        along = [name for name, other in self.parts.items() if has_matrix(other) and self._leads_to(other, root)]
        for number, combination in enumerate(combinations, 1):
            body, moved = _put_in(part, combination)
            yield replace(
                part,
                body=body,
                member=_member(part.name, number),
                values=combination.values,
                root=root.name,
                moved=moved,
                renames={name: _member(name, number) for name in along},
            )

    def _root(self, part: Part) -> Part | None:
        """The stage whose combinations these are; None when there is none, which is told."""
        matrix = part.body["matrix"]
        if isinstance(matrix, Mapping):
            return part
        if not isinstance(matrix, str) or "${" in matrix:
            # Of the wrong type, or a param without a value: told elsewhere.
            return None
        trail, at = [part.name], matrix
        while (problem := self._unfollowable(at, trail)) is None:
            further = self.parts[at].body["matrix"]
            if isinstance(further, Mapping):
                return self.parts[at]
            trail.append(at)
            at = further
        # What is wrong further on is told there.
        if len(trail) == 1 or at in trail:
            self._told(part, ("matrix",), problem[0], matrix, problem[1])
        return None

    def _unfollowable(self, name: Any, trail: Sequence[str]) -> tuple[str, str] | None:
        """Why a stage cannot follow another's matrix, and what to do; None when it can."""
        others = [each for each, part in self.parts.items() if has_matrix(part) and each not in trail]
        known = f"Stages with a matrix: {', '.join(others) or 'no other'}."
        if name not in self.parts:
            return f"there is no stage {name!r}", f"{did_you_mean(name, others)}{known}"
        if name in trail:
            return "these stages follow each other's matrix", "Write the values in one of them."
        if not has_matrix(self.parts[name]):
            return f"the stage {name} has no matrix to follow", f"Write one there, or the values here. {known}"
        return None

    def _leads_to(self, part: Part, root: Part) -> bool:
        seen: set[str] = set()
        while part.name not in seen:
            if part.name == root.name:
                return True
            seen.add(part.name)
            followed = self.parts.get(matrix) if isinstance(matrix := part.body.get("matrix"), str) else None
            if followed is None:
                return False
            part = followed
        return False

    def _combinations(self, root: Part) -> list[_Combination]:
        """Those of a matrix less the excluded ones; none when there is a mistake in it."""
        if root.name in self._known:
            return self._known[root.name]
        before = len(self.errors)
        found = self._product(root)
        found = self._without(root, found) if len(self.errors) == before else found
        self._known[root.name] = found if len(self.errors) == before else []
        return self._known[root.name]

    def _product(self, root: Part) -> list[_Combination]:
        matrix = root.body["matrix"]
        if not all(isinstance(values, list) and values for values in matrix.values()) or not matrix:
            return []
        for name, values in matrix.items():
            self._check_values(root, name, values)
        count = math.prod(len(values) for values in matrix.values())
        if count > _MOST_LOOKED_AT:
            self._too_many(root, count)
            return []
        names = list(matrix)
        return [
            _Combination(
                values={name: matrix[name][index] for name, index in zip(names, indices, strict=True)},
                places={name: root.at(("matrix", name, index)) for name, index in zip(names, indices, strict=True)},
            )
            for indices in itertools.product(*(range(len(values)) for values in matrix.values()))
        ]

    def _check_values(self, root: Part, name: str, values: Sequence[Any]) -> None:
        seen: set[str] = set()
        for index, value in enumerate(values):
            written = json.dumps(value, sort_keys=True, default=str)
            if written in seen:
                what = f"matrix.{name} has this value twice"
                self._told(root, ("matrix", name, index), what, value, "Keep one of them.", whole=True)
            seen.add(written)
            for path, text in texts_in(value, ("matrix", name, index)):
                if _REFERENCE.search(text):
                    what = "a value of a matrix cannot refer to the matrix"
                    self._told(root, path, what, text, "Write the value itself.")

    def _without(self, root: Part, combinations: list[_Combination]) -> list[_Combination]:
        excluded = root.body.get("exclude") or []
        if not isinstance(excluded, list) or not all(isinstance(entry, Mapping) for entry in excluded):
            return []
        left = combinations
        for index, entry in enumerate(excluded):
            names = root.body["matrix"]
            for name in entry:
                if name not in names:
                    remedy = f"{did_you_mean(name, names)}The matrix has: {', '.join(names)}."
                    self._told(root, ("exclude", index, name), f"the matrix has no {name!r}", None, remedy)
            if all(name in names for name in entry) and not any(_covers(entry, each) for each in combinations):
                what = "this leaves nothing out: no combination has these values"
                self._told(root, ("exclude", index), what, dict(entry), "Write values as they are in the matrix.")
            left = [each for each in left if not _covers(entry, each)]
        if combinations and not left:
            self._told(root, ("exclude",), "every combination is left out", None, "Keep one at least.")
        if len(left) > MOST_MEMBERS:
            self._too_many(root, len(left))
        return left

    def _too_many(self, root: Part, count: int) -> None:
        what = f"the matrix has {count} combinations, and {MOST_MEMBERS} are the most"
        self._told(root, ("matrix",), what, None, "Give fewer values, or leave combinations out with `exclude`.")

    def _check_uses(self, part: Part, combination: _Combination, root: Part) -> None:
        """Names that the matrix lacks, and names that nothing of the stage refers to."""
        used: set[str] = set()
        body = {name: value for name, value in part.body.items() if name not in OWN_FIELDS}
        for path, text in texts_in(body):
            for match in _REFERENCE.finditer(text):
                name = match.group(1) or ""
                used.add(name)
                if name not in combination.values:
                    known = ", ".join(combination.values)
                    remedy = f"{did_you_mean(name, combination.values)}The matrix has: {known}."
                    self._told(part, path, "the matrix has no such value", match.group(0), remedy)
        if part is not root or used - combination.values.keys():
            return
        for name in combination.values:
            if name not in used:
                what = f"nothing in the stage refers to matrix.{name}, so that its values would make the same stage"
                remedy = f"Write ${{matrix.{name}}} in a field of the stage, or drop it."
                self._told(part, ("matrix", name), what, None, remedy, key=True, whole=True)

    def _check_names(self, part: Part, count: int) -> None:
        last = _member(part.name, count)
        if re.match(NAME_PATTERN, part.name) and not re.match(NAME_PATTERN, last):
            what = f"the name is too long for members such as {last}"
            self._told(part, (), what, part.name, "Shorten it.", key=True)
        taken = [name for number in range(1, count + 1) if (name := _member(part.name, number)) in self.parts]
        for name in taken:
            what = f"the name {name} is taken by a member of {part.name}"
            self._told(self.parts[name], (), what, name, "Rename this stage.", key=True)

    def _stray(self, part: Part) -> None:
        """What only a matrix gives a meaning, in a stage without one."""
        remedy = "Add `matrix:` to the stage, or write the value itself."
        for path, text in texts_in(part.body):
            match = _REFERENCE.search(text)
            if match is not None:
                self._told(part, path, "the stage has no matrix", match.group(0), remedy)
        if part.kind is None or "member" in part.body:
            return
        for name in CLASSES[part.kind].model_fields.keys() & {"exclude", "failures"} & part.body.keys():
            if part.body[name] not in ([], "fail", None):
                what = "this has no effect in a stage without a matrix"
                self._told(part, (name,), what, None, "Add `matrix:`, or drop it.", key=True)

    def _told(
        self, part: Part, path: FieldPath, what: str, value: Any, remedy: str, *, key: bool = False, whole: bool = False
    ) -> None:
        shown = label(("stages", part.name, *path))
        where = self.places.at(part.at(path), key=key) or shown
        text = what if whole else f"{shown}: {what}"
        self.errors.append(UserError(ErrorCode.SPEC_INVALID, text, where=where, value=value, remedy=remedy))


def _member(name: str, number: int) -> str:
    return f"{name}-{number}"


def _covers(entry: Mapping[str, Any], combination: _Combination) -> bool:
    return all(combination.values.get(name) == value for name, value in entry.items())


def _put_in(part: Part, combination: _Combination) -> tuple[dict[str, Any], dict[FieldPath, FieldPath]]:
    """The stage's body with the values put in, and where those that are a whole field are written.

    A text that is one reference takes the value's type; an embedded one is text.
    """
    moved: dict[FieldPath, FieldPath] = {}

    def inner(item: Any, path: FieldPath) -> Any:
        if isinstance(item, Mapping):
            return {key: inner(each, (*path, key)) for key, each in item.items()}
        if isinstance(item, list):
            return [inner(each, (*path, index)) for index, each in enumerate(item)]
        if not isinstance(item, str):
            return item
        whole = _REFERENCE.fullmatch(item)
        if whole is not None and whole.group(1) in combination.values:
            moved[path] = combination.places[whole.group(1)]
            return combination.values[whole.group(1)]
        return _REFERENCE.sub(
            lambda match: (
                _text(combination.values[match.group(1)]) if match.group(1) in combination.values else match.group(0)
            ),
            item,
        )

    body = {name: value for name, value in part.body.items() if name not in OWN_FIELDS}
    return inner(body, ()), moved


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)
