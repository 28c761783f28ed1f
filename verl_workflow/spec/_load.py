"""Pipeline files, and pipelines written in Python, to checked documents: all mistakes at once, each with its place."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from verl_workflow.errors import ErrorCode, UserError, UserErrors
from verl_workflow.paths import absolute
from verl_workflow.spec._check import check_draft, data_paths
from verl_workflow.spec._draft import Draft, Part
from verl_workflow.spec._dump import plain
from verl_workflow.spec._fields import REFERENCE, FieldPath
from verl_workflow.spec._inputs import Model
from verl_workflow.spec._matrix import expand, has_matrix
from verl_workflow.spec._model import CLASSES, Head, Pipeline, Stage
from verl_workflow.spec._params import read_params, substitute
from verl_workflow.spec._python import is_python, pipeline_from_python
from verl_workflow.spec._words import did_you_mean, explain
from verl_workflow.spec._yaml import Places, read_yaml


@dataclass(frozen=True, kw_only=True)
class Document:
    """A pipeline that has passed all checks.

    Attributes:
        pipeline: params substituted; a stage with a matrix replaced by its members; relative data and model paths made
            absolute against the file's folder. Storage stays relative to the working directory, code to the folder of
            `path`.
        path: absolute path of the file (for a pipeline object: of the folder it was resolved against, plus a name).
        params: final values by name.
        parts: the stages as they are written, by name.
    """

    pipeline: Pipeline
    path: Path
    params: Mapping[str, Any]
    places: Places = field(repr=False, compare=False)
    parts: Mapping[str, Part] = field(repr=False, compare=False)

    def where(self, field_path: FieldPath) -> str:
        """``file:line:column`` of a field's key, for example of ``("stages", "train", "steps")``.

        A field that is not written down yields the nearest one around it; a Python file has no lines for fields.
        """
        path = tuple(field_path)
        if len(path) > 1 and path[0] == "stages" and path[1] in self.parts:
            path = self.parts[str(path[1])].at(path[2:])
        return self.places.at(path, key=True)


def load(path: str | os.PathLike[str], params: Mapping[str, Any] | None = None) -> Document:
    """Read and check a pipeline.

    Args:
        path: a YAML file; or a Python file with a variable `pipeline`, or ``file.py:variable``.
        params: values by name; text is read by the declared type, as on the command line.

    Raises:
        UserError: the file is missing, no mapping, or no YAML (or Python).
        UserErrors: all mistakes in it.
    """
    shown = os.fspath(path)
    if is_python(shown):
        file, pipeline = pipeline_from_python(shown)
        places = Places(file=str(file), spots={})
        return _assemble(plain(pipeline, stages_as_list=True), params or {}, absolute(file), places)
    full = absolute(shown)
    marked = read_yaml(full, shown)
    return _assemble(marked.data, params or {}, full, marked.places)


def resolve(
    pipeline: Pipeline, base_dir: str | os.PathLike[str] = ".", params: Mapping[str, Any] | None = None
) -> Document:
    """Check a pipeline object and put params in, as `load` does for a file in `base_dir`.

    Raises:
        UserErrors: all mistakes in it, placed by field.
    """
    data = plain(pipeline, stages_as_list=True)
    path = absolute(base_dir) / f"{pipeline.name}.py"
    return _assemble(data, params or {}, path, Places(file="", spots={}))


def _assemble(data: dict[str, Any], given: Mapping[str, Any], path: Path, places: Places) -> Document:
    values, declared, errors = read_params(data.get("params"), given, places)
    body, found = substitute({k: v for k, v in data.items() if k != "params"}, values, declared, places)
    errors += found
    head, found = _head(body, data.get("params"), places, ignore_params=bool(errors))
    errors += found
    stages, parts, found = _parts(body, places)
    errors += found
    draft = Draft(head=head, has_model=body.get("model") is not None, parts=parts)
    errors += check_draft(draft, path.parent, places)
    if errors:
        raise UserErrors(sorted(_unique(errors), key=_position))
    stages = [_placed(stage, part, path.parent) for stage, part in zip(stages, parts, strict=True)]
    model = None if head.model is None else _absolute_model(head.model, path.parent)
    fields = {name: getattr(head, name) for name in Head.model_fields}
    pipeline = Pipeline(**{**fields, "model": model, "stages": stages})
    named = {part.member or part.name: part for part in parts}
    return Document(pipeline=pipeline, path=path, params=values, places=places, parts=named)


def _head(body: Mapping[str, Any], params: Any, places: Places, *, ignore_params: bool) -> tuple[Head, list[UserError]]:
    fields = {key: value for key, value in body.items() if key != "stages"}
    if params is not None and not ignore_params:
        fields["params"] = params
    errors: list[UserError] = []
    if "version" not in body and places.spots:
        errors.append(
            UserError(
                ErrorCode.SPEC_INVALID,
                "the pipeline has no 'version'",
                where=places.at((), key=True),
                remedy="Add `version: 1`.",
            )
        )
    try:
        return Head.model_validate(fields), errors
    except ValidationError as error:
        errors += explain(error, Head, fields, prefix=(), shown="", places=places, also=["stages"])
        wrong = {detail["loc"][0] for detail in error.errors(include_url=False)}
        # What is right of it is checked further.
        rest = {key: value for key, value in fields.items() if key not in wrong}
        return Head.model_validate({"name": "unnamed", **rest}), errors


def _parts(body: Mapping[str, Any], places: Places) -> tuple[list[Stage], list[Part], list[UserError]]:
    """The stages that are right in themselves; all that have a name; the mistakes."""
    written = body.get("stages")
    where = places.at(("stages",))
    if "stages" not in body:
        return [], [], [_error("the pipeline has no 'stages'", places.at((), key=True), None, "Add `stages:`.")]
    if not isinstance(written, (Mapping, list)):
        remedy = "Write `stages: {name: {kind: ...}}`."
        return [], [], [_error("stages should be a mapping of names to stages", where, _told(written), remedy)]
    if not written:
        return [], [], [_error("the pipeline has no stage", where, None, "Add one under `stages`.")]
    parts: list[Part] = []
    errors: list[UserError] = []
    for key, stage_body in written.items() if isinstance(written, Mapping) else enumerate(written):
        path: FieldPath = ("stages", key)
        fields = stage_body if isinstance(stage_body, Mapping) else {}
        name = key if isinstance(key, str) else fields.get("name")
        kind = fields.get("kind")
        known = kind if isinstance(kind, str) and kind in CLASSES else None
        part = Part(name=name, kind=known, path=path, body=fields) if isinstance(name, str) else None
        if part is not None:
            parts.append(part)
        if part is None or known is None or has_matrix(part):
            found = _stage(path, name, stage_body, places)
            errors += found if isinstance(found, list) else []
    parts, found_errors = expand(parts, places)
    errors += found_errors
    stages: list[Stage] = []
    for part in parts:
        if part.kind is None or has_matrix(part):
            continue
        stage = _stage(part.path, part.name, part.body, places.moved(part.path, part.moved))
        if isinstance(stage, list):
            errors += stage
        else:
            stages.append(stage)
    return stages, parts, errors


def _stage(path: FieldPath, name: Any, body: Any, places: Places) -> Stage | list[UserError]:
    in_mapping = isinstance(path[1], str)
    shown = f"stages.{name}" if isinstance(name, str) else f"stages[{path[1]}]"
    if not isinstance(body, Mapping):
        return [_error(f"{shown} should be a mapping", places.at(path), _told(body), "Give it a `kind`.")]
    if in_mapping and "name" in body:
        remedy = "Drop `name`: the key in front of the stage is its name."
        where = places.at((*path, "name"), key=True)
        return [_error(f"{shown} has a name of its own", where, _told(body["name"]), remedy)]
    kinds = ", ".join(CLASSES)
    if "kind" not in body:
        meant = [key for key in body if did_you_mean(key, ["kind"])]
        hint = f"Did you mean 'kind' by {meant[0]!r}? " if meant else ""
        where = places.at(path, key=True)
        return [_error(f"{shown} has no 'kind'", where, None, f"{hint}Add `kind:`, one of {kinds}.")]
    kind = body["kind"]
    if not isinstance(kind, str) or kind not in CLASSES:
        remedy = f"{did_you_mean(kind, CLASSES)}Kinds: {kinds}."
        return [_error(f"{shown}: unknown kind of stage", places.at((*path, "kind")), _told(kind), remedy)]
    model = CLASSES[kind]
    fields = {**body, "name": name} if in_mapping else body
    try:
        return model.model_validate(fields)
    except ValidationError as error:
        hidden = ["name"] if in_mapping else []
        return explain(error, model, fields, prefix=path, shown=shown, places=places, hidden=hidden)


def _told(value: Any) -> Any:
    return "null" if value is None else value


def _placed(stage: Stage, part: Part, base_dir: Path) -> Stage:
    """The stage as it runs: paths absolute; a member under its own name, with those of its like in its references."""
    fields = stage.model_dump()
    if part.member is not None:
        member = {"of": part.name, "values": dict(part.values)}
        fields = {**_renamed(fields, part.renames), "name": part.member, "member": member}
    for path, text, _ in data_paths(stage.kind, fields):
        target: Any = fields
        for step in path[:-1]:
            target = target[step]
        target[path[-1]] = _full(text, base_dir)
    return CLASSES[stage.kind].model_validate(fields)


def _renamed(fields: Mapping[str, Any], names: Mapping[str, str]) -> dict[str, Any]:
    def inner(value: Any) -> Any:
        if isinstance(value, Mapping):
            return {key: inner(each) for key, each in value.items()}
        if isinstance(value, list):
            return [inner(each) for each in value]
        if not isinstance(value, str):
            return value
        return REFERENCE.sub(lambda match: match.group(0).replace(match[1], names.get(match[1], match[1]), 1), value)

    held = {*CLASSES[fields["kind"]].INPUTS, "overrides"}
    after = [names.get(name, name) for name in fields["after"]]
    return {**{key: inner(value) if key in held else value for key, value in fields.items()}, "after": after}


def _absolute_model(model: Model, base_dir: Path) -> Model:
    if model.path is not None:
        return Model(path=_full(model.path, base_dir))
    if model.gguf is not None and not model.gguf.startswith("package:"):
        return Model(gguf=_full(model.gguf, base_dir))
    return model


def _full(text: str, base_dir: Path) -> str:
    return os.path.normpath(absolute(text, base=base_dir, home=True))


def _unique(errors: list[UserError]) -> list[UserError]:
    seen: dict[str, UserError] = {}
    for error in errors:
        seen.setdefault(str(error), error)
    return list(seen.values())


def _position(error: UserError) -> tuple[int, int]:
    match = re.search(r":(\d+):(\d+)$", error.where)
    return (int(match.group(1)), int(match.group(2))) if match else (0, 0)


def _error(what: str, where: str, value: Any, remedy: str) -> UserError:
    return UserError(ErrorCode.SPEC_INVALID, what, where=where, value=value, remedy=remedy)
