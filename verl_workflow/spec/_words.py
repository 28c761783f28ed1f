"""Plain words for what pydantic finds, with the place, the value and the nearest right spelling."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from typing import Any, get_args

from pydantic import BaseModel, ValidationError

from verl_workflow.errors import ErrorCode, UserError
from verl_workflow.spec._fields import FUNCTION_PATTERN, NAME_PATTERN, FieldPath
from verl_workflow.spec._yaml import Places

_TYPES = {
    "int": "a whole number",
    "float": "a number",
    "string": "text",
    "bool": "true or false",
    "list": "a list",
    "dict": "a mapping",
    "model": "a mapping",
    "finite_number": "a finite number",
}
_BOUNDS = {
    "greater_than": ("greater than", "gt"),
    "greater_than_equal": ("at least", "ge"),
    "less_than": ("less than", "lt"),
    "less_than_equal": ("at most", "le"),
}
_PATTERNS = {
    NAME_PATTERN: "should be a name: letters, digits, _ and -, first a letter or _, 64 characters at most",
    FUNCTION_PATTERN: "should name a function, as file.py:function or package.module:function",
}


def did_you_mean(value: Any, options: Iterable[str]) -> str:
    """``Did you mean 'x'?`` with a space after it, or nothing when no option is near."""
    by_lower = {option.lower(): option for option in options}
    close = difflib.get_close_matches(str(value).lower(), by_lower, n=1, cutoff=0.7)
    return f"Did you mean {by_lower[close[0]]!r}? " if close and by_lower[close[0]] != value else ""


def label(path: FieldPath, names: Mapping[int, str] | None = None) -> str:
    """A field's name as people write it: ``stages.train.after[0]``."""
    text = ""
    for index, part in enumerate(path):
        if isinstance(part, int) and index == 1 and path[0] == "stages" and names and part in names:
            part = names[part]
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else str(part)
    return text


def explain(
    error: ValidationError,
    model: type[BaseModel],
    data: Any,
    *,
    prefix: FieldPath,
    shown: str,
    places: Places,
    also: Iterable[str] = (),
    hidden: Iterable[str] = (),
) -> list[UserError]:
    """One error for each field.

    Args:
        model, data: what was validated as what. prefix: where `data` stands in the file. shown: its name in messages.
        also, hidden: keys that are right beside the model's own fields, and fields that are no keys.
    """
    found: dict[FieldPath, UserError] = {}
    for detail in error.errors(include_url=False):
        path = _data_path(detail["loc"], data, missing=detail["type"] == "missing")
        if path in found:
            continue
        owner = _model_at(model, path[:-1])
        keys = [*owner.model_fields] if owner is not None else []
        if len(path) <= 1:
            keys = [key for key in keys if key not in set(hidden)] + list(also)
        found[path] = _one(detail, path, prefix=prefix, shown=shown, places=places, keys=keys)
    return list(found.values())


def _one(detail: Any, path: FieldPath, *, prefix: FieldPath, shown: str, places: Places, keys: list[str]) -> UserError:
    kind, value, context = detail["type"], detail["input"], detail.get("ctx", {})
    whole = (*prefix, *path)
    name = _joined(shown, path)
    if kind == "missing":
        owner = _joined(shown, path[:-1]) or "the pipeline"
        where = places.at(whole[:-1], key=True)
        return _error(f"{owner} has no {path[-1]!r}", where, None, f"Add `{path[-1]}:`.")
    if kind == "extra_forbidden":
        hint = did_you_mean(path[-1], keys)
        owner = _joined(shown, path[:-1])
        what = "unknown key" + (f" in {owner}" if owner else "")
        known = f"Known: {', '.join(sorted(keys))}." if not hint or len(keys) <= 10 else ""
        return _error(what, places.at(whole, key=True), path[-1], f"{hint}{known}".strip())
    where = places.at(whole)
    if kind == "value_error":
        told = value if isinstance(value, (int, float)) else None
        return _error(f"{name}: {context['error']}", places.at(whole, key=True), told, "")
    if kind == "literal_error":
        options = [option.strip("'") for option in str(context["expected"]).replace(" or ", ", ").split(", ")]
        hint = did_you_mean(value, options).strip()
        return _error(f"{name} should be {_either(options)}", where, _plain(value), hint)
    if kind in {"string_too_short", "too_short"}:
        return _error(f"{name} is empty", where, _plain(value), "Give it a value, or drop the key.")
    if kind == "string_pattern_mismatch":
        words = _PATTERNS.get(context.get("pattern", ""), f"should match {context.get('pattern')}")
        return _error(f"{name} {words}", where, _plain(value), "")
    if kind in _BOUNDS:
        words, key = _BOUNDS[kind]
        return _error(f"{name} should be {words} {context[key]:g}", where, _plain(value), "")
    expected = _TYPES.get(kind) or _TYPES.get(kind.split("_")[0])
    if expected is not None:
        return _error(f"{name} should be {expected}", where, _plain(value), "")
    message = str(detail["msg"])
    return _error(f"{name}: {message[:1].lower()}{message[1:]}", where, _plain(value), "")


def _error(what: str, where: str, value: Any, remedy: str) -> UserError:
    return UserError(ErrorCode.SPEC_INVALID, what, where=where, value=value, remedy=remedy)


def _plain(value: Any) -> Any:
    return "null" if value is None else value


def _joined(shown: str, path: FieldPath) -> str:
    rest = label(path)
    return f"{shown}.{rest}" if shown and rest else shown or rest


def _either(options: list[str]) -> str:
    return options[0] if len(options) == 1 else f"{', '.join(options[:-1])} or {options[-1]}"


def _data_path(location: tuple[str | int, ...], data: Any, *, missing: bool) -> FieldPath:
    """Pydantic's location less the parts that are no keys of the data (names of union members)."""
    path: list[str | int] = []
    for index, part in enumerate(location):
        if isinstance(data, BaseModel):
            data = data.model_dump()
        inside = isinstance(data, Mapping) and part in data
        inside = inside or (isinstance(data, list) and isinstance(part, int) and part < len(data))
        if inside:
            path.append(part)
            data = data[part]
        elif missing and index == len(location) - 1:
            path.append(part)
    return tuple(path)


def _model_at(model: type[BaseModel], path: FieldPath) -> type[BaseModel] | None:
    found: type[BaseModel] | None = model
    for part in path:
        if isinstance(part, int) or found is None:
            continue
        field = found.model_fields.get(str(part))
        found = _model_in(field.annotation) if field is not None else None
    return found


def _model_in(annotation: Any) -> type[BaseModel] | None:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    for inner in get_args(annotation):
        found = _model_in(inner)
        if found is not None:
            return found
    return None
