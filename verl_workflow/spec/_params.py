"""Params: typed values given at the start, put where ``${params.name}`` stands."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field, StringConstraints, TypeAdapter, ValidationError, model_validator
from pydantic_core import SchemaError

from verl_workflow.errors import ErrorCode, UserError
from verl_workflow.spec._fields import NAME_PATTERN, FieldPath, Json, Strict
from verl_workflow.spec._words import did_you_mean, explain
from verl_workflow.spec._yaml import Places

_REFERENCE = re.compile(r"\$\{params(?:\.([^}]*))?\}")
_WORDS = {"string": "text", "integer": "a whole number", "number": "a number", "boolean": "true or false"}


class Param(Strict):
    """A value given at the start (``-p name=value``), in JSON Schema's words."""

    type: Literal["string", "integer", "number", "boolean"]
    default: Json = None
    description: str = ""
    enum: Annotated[list[Json], Field(min_length=1)] | None = None
    minimum: float | None = None
    maximum: float | None = None
    pattern: str | None = None

    @model_validator(mode="after")
    def _pattern_compiles(self) -> Param:
        try:
            re.compile(self.pattern or "")
        except re.error as error:
            raise ValueError(f"its pattern is no regular expression: {error}") from error
        try:
            self.matches("")
        except SchemaError as error:
            raise ValueError(
                "its pattern takes a matcher that may never end: look-around, back-references and counts of many "
                "thousands are not supported"
            ) from error
        return self

    def matches(self, text: str) -> bool:
        """Whether `pattern` is found in a text, in time that grows with its length and no faster."""
        if self.pattern is None:
            return True
        # Python's own matcher goes through exponentially many ways to match `(a+)+`; this one has no such patterns.
        found = TypeAdapter(
            Annotated[str, StringConstraints(pattern=self.pattern)], config=ConfigDict(regex_engine="rust-regex")
        )
        try:
            found.validate_python(text)
        except ValidationError:
            return False
        return True


def read_params(
    declared: Any, given: Mapping[str, Any], places: Places
) -> tuple[dict[str, Any], frozenset[str], list[UserError]]:
    """Check what is declared and what is given.

    Returns:
        The final values; all declared names, usable or not; the mistakes.
    """
    errors: list[UserError] = []
    if declared is None:
        declared = {}
    if not isinstance(declared, Mapping):
        what = "params should be a mapping of names to declarations"
        errors.append(_spec(what, places.at(("params",)), declared, "Write `params: {steps: {type: integer}}`."))
        return {}, frozenset(given), errors
    params: dict[str, Param] = {}
    for name, body in declared.items():
        path: FieldPath = ("params", name)
        if not re.match(NAME_PATTERN, name):
            errors.append(_spec("a param's name has letters, digits, _ and -", places.at(path, key=True), name, ""))
            continue
        try:
            params[name] = Param.model_validate(body)
        except ValidationError as error:
            shown = f"params.{name}"
            errors.extend(explain(error, Param, body, prefix=path, shown=shown, places=places))
    values: dict[str, Any] = {}
    for name, param in params.items():
        place = places.at(("params", name, "default"))
        if param.default is not None:
            errors.extend(_checked(name, param, param.default, f"the default of params.{name}", place, values))
        if name in given:
            values.pop(name, None)
            errors.extend(_given(name, param, given[name], values))
        elif param.default is None:
            where = places.at(("params", name), key=True)
            what = f"params.{name} has no default and was not given"
            errors.append(_error(what, where, None, f"Give it: -p {name}=<{param.type}>."))
    for name in given:
        if name not in declared:
            known = ", ".join(declared) or "none"
            hint = did_you_mean(name, declared)
            errors.append(_error("there is no such param", "-p", name, f"{hint}Declared params: {known}."))
    return values, frozenset(declared), errors


def substitute(
    value: Any, values: Mapping[str, Any], declared: frozenset[str], places: Places, path: FieldPath = ()
) -> tuple[Any, list[UserError]]:
    """`value` with params put in: a text that is one reference takes the param's type, an embedded one is text.

    References to params that are declared but have no usable value stay, for their mistake is known already.
    """
    errors: list[UserError] = []

    def inner(item: Any, where: FieldPath) -> Any:
        if isinstance(item, Mapping):
            return {key: inner(each, (*where, key)) for key, each in item.items()}
        if isinstance(item, list):
            return [inner(each, (*where, index)) for index, each in enumerate(item)]
        if not isinstance(item, str):
            return item
        for match in _REFERENCE.finditer(item):
            if match.group(1) not in declared:
                hint = did_you_mean(match.group(1) or "", declared)
                known = ", ".join(sorted(declared)) or "none"
                remedy = f"{hint}Declared params: {known}."
                errors.append(_error("there is no such param", places.at(where), match.group(0), remedy))
        whole = _REFERENCE.fullmatch(item)
        if whole is not None:
            return values.get(whole.group(1), item)
        return _REFERENCE.sub(
            lambda match: _text(values[match.group(1)]) if match.group(1) in values else match.group(0), item
        )

    return inner(value, path), errors


def _given(name: str, param: Param, value: Any, values: dict[str, Any]) -> list[UserError]:
    place = f"-p {name}"
    if isinstance(value, str):
        if not _is_unicode(value):
            return [_error(f"params.{name} is no UTF-8 text", place, value, "Write it in UTF-8.")]
        parsed = _parse(param.type, value)
        if parsed is None:
            return [_error(f"params.{name} should be {_WORDS[param.type]}", place, value, _example(name, param))]
        value = parsed
    return _checked(name, param, value, f"params.{name}", place, values)


def _is_unicode(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        # Bytes of an argument that are no text come as lone surrogates, which no record of a run can hold.
        return False
    return True


def _parse(kind: str, text: str) -> Any:
    if kind == "string":
        return text
    stripped = text.strip()
    if kind == "boolean":
        return {"true": True, "false": False}.get(stripped.lower())
    if re.fullmatch(r"[-+]?[0-9]+", stripped):
        return int(stripped)
    if kind == "integer":
        return None
    try:
        number = float(stripped)
    except ValueError:
        return None
    return number if math.isfinite(number) else None


def _checked(name: str, param: Param, value: Any, shown: str, place: str, values: dict[str, Any]) -> list[UserError]:
    import jsonschema

    schema = param.model_dump(exclude_none=True, exclude={"default", "description", "pattern"})
    errors = []
    for problem in jsonschema.Draft202012Validator(schema).iter_errors(value):
        if problem.validator == "type":
            errors = [_error(f"{shown} should be {_WORDS[param.type]}", place, value, _example(name, param))]
            break
        limit = problem.validator_value
        words = {
            "enum": f"should be one of {', '.join(map(str, limit)) if isinstance(limit, list) else limit}",
            "minimum": f"should be at least {_short(limit)}",
            "maximum": f"should be at most {_short(limit)}",
        }[str(problem.validator)]
        hint = did_you_mean(value, map(str, limit)).strip() if problem.validator == "enum" else ""
        errors.append(_error(f"{shown} {words}", place, value, hint))
    if isinstance(value, str) and not param.matches(value):
        errors.append(_error(f"{shown} should match {param.pattern}", place, value, ""))
    if isinstance(value, float) and not math.isfinite(value):
        errors = [_error(f"{shown} should be a finite number", place, value, "")]
    if not errors:
        values[name] = int(value) if param.type == "integer" else value
    return errors


def _example(name: str, param: Param) -> str:
    example = {"string": "text", "integer": "3", "number": "0.5", "boolean": "true"}[param.type]
    return f"Write it like -p {name}={example}."


def _short(limit: Any) -> str:
    return f"{limit:.15g}" if isinstance(limit, float) else str(limit)


def _text(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _error(what: str, where: str, value: Any, remedy: str) -> UserError:
    return UserError(ErrorCode.PARAM_INVALID, what, where=where, value=value, remedy=remedy)


def _spec(what: str, where: str, value: Any, remedy: str) -> UserError:
    return UserError(ErrorCode.SPEC_INVALID, what, where=where, value=value, remedy=remedy)
