"""What has to hold between a pipeline's parts, and between them and the files beside it."""

from __future__ import annotations

import glob
import importlib.util
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from verl_workflow.errors import ErrorCode, UserError
from verl_workflow.gates import GATE_NAMES, check_gate
from verl_workflow.spec import _functions
from verl_workflow.spec._model import (
    OUTPUTS,
    REFERENCE,
    DataStage,
    EvaluateStage,
    FieldPath,
    Head,
    Model,
    Pipeline,
    PromoteStage,
    PythonStage,
    Source,
    Stage,
    VerlStage,
)
from verl_workflow.spec._words import did_you_mean, label
from verl_workflow.spec._yaml import Places

RESERVED = frozenset({"model", "params"})
_PACKAGE = "package:"
# Outputs that are files or folders, which inputs other than `args` need.
_FILES: Mapping[str, frozenset[str]] = {
    "data": frozenset({"train", "validation", "rejected"}),
    "verl": frozenset({"model", "metrics"}),
    "evaluate": frozenset({"model", "results"}),
    "promote": frozenset({"model"}),
}


@dataclass(frozen=True, kw_only=True)
class Part:
    """A stage as far as it could be understood. Attributes: stage is None when it has mistakes of its own."""

    name: str
    kind: str | None
    path: FieldPath
    stage: Stage | None


@dataclass(frozen=True, kw_only=True)
class Draft:
    """A pipeline that may have mistakes. Attributes: has_model says whether `model` is written down, right or wrong."""

    head: Head | None
    has_model: bool
    parts: Sequence[Part]


def check(pipeline: Pipeline, base_dir: Path) -> list[UserError]:
    """All mistakes that are not one field's own: references, cycles, functions, files, gates.

    Args:
        base_dir: folder in which code and relative data paths lie.
    """
    parts = [Part(name=s.name, kind=s.kind, path=("stages", s.name), stage=s) for s in pipeline.stages]
    draft = Draft(head=pipeline, has_model=pipeline.model is not None, parts=parts)
    return check_draft(draft, base_dir, Places(file="", spots={}))


def check_draft(draft: Draft, base_dir: Path, places: Places) -> list[UserError]:
    """As `check`, for what could be understood of a file with mistakes."""
    return list(_Checker(draft, Path(base_dir), places).errors())


class _Checker:
    def __init__(self, draft: Draft, base_dir: Path, places: Places) -> None:
        self.draft = draft
        self.base_dir = base_dir
        self.places = places
        self.kinds = {part.name: part.kind for part in draft.parts}

    def errors(self) -> Iterator[UserError]:
        yield from self._names()
        if self.draft.head is not None:
            yield from self._head(self.draft.head)
        for part in self.draft.parts:
            if part.stage is not None:
                yield from self._stage(part, part.stage)
        yield from self._cycles()

    def _names(self) -> Iterator[UserError]:
        seen: set[str] = set()
        for part in self.draft.parts:
            if part.name in RESERVED:
                what = f"a stage cannot be called {part.name}, for ${{{part.name}}} means the pipeline's"
                yield self._error(part, (), what, part.name, "Choose another name.", key=True)
            if part.name in seen:
                what = "two stages have the same name"
                yield self._error(part, ("name",), what, part.name, "Rename one of them.", key=True)
            seen.add(part.name)

    def _head(self, head: Head) -> Iterator[UserError]:
        for index, entry in enumerate(head.code):
            where = self._where(("code", index))
            yield from _caught(partial(_functions.contained, self.base_dir, entry, where))
        if head.model is not None:
            yield from self._model(head.model)

    def _model(self, model: Model) -> Iterator[UserError]:
        if model.path is not None and not _at(self.base_dir, model.path).is_dir():
            yield self._missing(("model", "path"), "the model folder does not exist", model.path)
        if model.gguf is not None and model.gguf.startswith(_PACKAGE):
            package = model.gguf.removeprefix(_PACKAGE)
            if not package.isidentifier() or importlib.util.find_spec(package) is None:
                yield UserError(
                    ErrorCode.FILE_MISSING,
                    f"the package {package} is not installed",
                    where=self._where(("model", "gguf")),
                    value=model.gguf,
                    remedy="Install the distribution that has it.",
                )
        elif model.gguf is not None and not _at(self.base_dir, model.gguf).is_file():
            yield self._missing(("model", "gguf"), "the GGUF file does not exist", model.gguf)

    def _stage(self, part: Part, stage: Stage) -> Iterator[UserError]:
        for index, name in enumerate(stage.after):
            if name == part.name:
                yield self._error(part, ("after", index), "the stage comes after itself", name, "Drop it.")
            elif name not in self.kinds:
                yield self._unknown_stage(part, ("after", index), name, name)
        for path, value in _texts(stage.model_dump(mode="json", include=set(stage.INPUTS), warnings=False)):
            yield from self._input(part, path, value)
        yield from self._stray(part, stage)
        for path, function in _function_fields(stage):
            where = self._where((*part.path, *path))
            yield from _caught(partial(_functions.check_function, function, self.base_dir, where))
        for path, pattern, many in data_paths(stage):
            if not has_files(self.base_dir, pattern, many=many):
                what = "no file matches" if many and glob.has_magic(pattern) else "the file does not exist"
                yield self._missing((*part.path, *path), what, pattern)
        if isinstance(stage, PromoteStage):
            yield from self._promotion(part, stage)

    def _stray(self, part: Part, stage: Stage) -> Iterator[UserError]:
        """References in fields that nothing resolves."""
        if isinstance(stage, (DataStage, VerlStage, EvaluateStage)) and stage.reward is not None:
            for path, value in _texts(stage.reward.kwargs, ("reward", "kwargs")):
                match = REFERENCE.fullmatch(value)
                if match is not None and match.group(1) in self.kinds:
                    what = "a reward cannot refer to a stage's output"
                    yield self._error(part, path, what, value, f"References go in {', '.join(stage.INPUTS)}.")

    def _input(self, part: Part, path: FieldPath, value: str) -> Iterator[UserError]:
        if "${" not in value:
            return
        match = REFERENCE.fullmatch(value)
        if match is None:
            what = "a reference has to be the whole value" if REFERENCE.search(value) else "this is no reference"
            yield self._error(part, path, what, value, "Write it like ${stage.output}.")
            return
        name, output = match.groups()
        if name == "params":
            return
        if name == "model":
            yield from self._model_reference(part, path, value, output)
        elif name == part.name:
            yield self._error(part, path, "the stage refers to itself", value, "Refer to a stage before it.")
        elif name not in self.kinds:
            yield self._unknown_stage(part, path, name, value)
        else:
            yield from self._output(part, path, value, name, output)

    def _model_reference(self, part: Part, path: FieldPath, value: str, output: str | None) -> Iterator[UserError]:
        if output is not None:
            yield self._error(part, path, "the pipeline's model has no outputs", value, "Write ${model}.")
        elif not self.draft.has_model:
            what = f"{self._label(part, path)} is {value}, and the pipeline has no `model`"
            remedy = "Add `model:` to the pipeline, or name a folder or another stage's model."
            yield self._error(part, path, what, None, remedy, whole=True)

    def _output(self, part: Part, path: FieldPath, value: str, name: str, output: str | None) -> Iterator[UserError]:
        kind = self.kinds[name]
        outputs = OUTPUTS.get(kind) if kind is not None else None
        first, _, rest = (output or "").partition(".")
        if outputs is not None and output is not None and first not in outputs:
            remedy = f"{did_you_mean(first, outputs)}A stage of kind {kind} has: {', '.join(sorted(outputs))}."
            yield self._error(part, path, f"the stage {name} has no output {first!r}", value, remedy)
        elif path[0] in {"args", "evaluation"} or kind is None or kind not in _FILES:
            return
        elif not rest and first not in _FILES[kind]:
            what = f"{value} is no file" if output else "the reference names no output"
            remedy = f"Files of {name}: {', '.join(f'${{{name}.{each}}}' for each in sorted(_FILES[kind]))}."
            yield self._error(part, path, what, value, remedy)

    def _promotion(self, part: Part, stage: PromoteStage) -> Iterator[UserError]:
        match = REFERENCE.fullmatch(stage.evaluation)
        kind = self.kinds.get(match.group(1), "evaluate") if match is not None else None
        right = match is not None and match.group(2) is None and kind in {"evaluate", None}
        if not right and not (match is not None and match.group(1) not in self.kinds):
            stages = [f"${{{name}}}" for name, each in self.kinds.items() if each == "evaluate"]
            remedy = f"Evaluate stages: {', '.join(stages)}." if stages else "Add a stage of kind evaluate."
            yield self._error(part, ("evaluation",), "evaluation has to be an evaluate stage", stage.evaluation, remedy)
        try:
            check_gate(stage.gate, GATE_NAMES)
        except UserError as error:
            where = self._where((*part.path, "gate"))
            yield UserError(error.code, error.what, where=where, value=error.value, remedy=error.remedy)

    def _cycles(self) -> Iterator[UserError]:
        needs = {part.name: sorted(part.stage.needs() & set(self.kinds)) for part in self.draft.parts if part.stage}
        done: set[str] = set()
        for start in needs:
            cycle = _cycle_from(start, needs, done)
            if cycle is not None:
                part = next(part for part in self.draft.parts if part.name == cycle[0])
                where = self._where((*part.path, *_edge(part.stage, cycle[1])))
                yield UserError(
                    ErrorCode.SPEC_INVALID,
                    f"the stages wait for each other: {' -> '.join(cycle)}",
                    where=where,
                    remedy="Drop one of these references.",
                )

    def _unknown_stage(self, part: Part, path: FieldPath, name: str, value: str) -> UserError:
        others = [each for each in self.kinds if each != part.name]
        remedy = f"{did_you_mean(name, others)}Stages: {', '.join(others) or 'no other'}."
        return self._error(part, path, f"there is no stage {name!r}", value, remedy)

    def _missing(self, path: FieldPath, what: str, value: str) -> UserError:
        full = _at(self.base_dir, value)
        shown = "" if str(full) == value else f", looked for at {full}"
        remedy = f"{_near(full)}Relative paths start at the folder of the pipeline file."
        return UserError(ErrorCode.FILE_MISSING, f"{what}{shown}", where=self._where(path), value=value, remedy=remedy)

    def _error(
        self, part: Part, path: FieldPath, what: str, value: Any, remedy: str, *, key: bool = False, whole: bool = False
    ) -> UserError:
        where = self._where((*part.path, *path), key=key)
        shown = what if whole or not path else f"{self._label(part, path)}: {what}"
        return UserError(ErrorCode.SPEC_INVALID, shown, where=where, value=value, remedy=remedy)

    def _label(self, part: Part, path: FieldPath) -> str:
        return label(("stages", part.name, *path))

    def _where(self, path: FieldPath, *, key: bool = False) -> str:
        names = {part.path[1]: part.name for part in self.draft.parts if isinstance(part.path[1], int)}
        return self.places.at(path, key=key) or label(path, names)


def data_paths(stage: Stage) -> Iterator[tuple[FieldPath, str, bool]]:
    """The literal data files and folders a stage names: (path of the field, what is written, whether globs count)."""
    if isinstance(stage, DataStage):
        for field, source in (("source", stage.source), ("validation", stage.validation)):
            if isinstance(source, Source):
                yield from _source_paths(field, source)
        return
    for field in stage.INPUTS if isinstance(stage, (VerlStage, EvaluateStage)) else ():
        value = getattr(stage, field)
        if _is_path(value):
            yield (field,), value, False


def _source_paths(field: str, source: Source) -> Iterator[tuple[FieldPath, str, bool]]:
    for key in ("parquet", "jsonl"):
        value = getattr(source, key)
        if isinstance(value, str) and _is_path(value):
            yield (field, key), value, True
        elif isinstance(value, list):
            for index, item in enumerate(value):
                if _is_path(item):
                    yield (field, key, index), item, True


def has_files(base_dir: Path, pattern: str, *, many: bool) -> bool:
    """Whether something is at a path, or (`many`) a file matches it as a glob."""
    path = _at(base_dir, pattern)
    if not many:
        return path.exists()
    inside = str(path.relative_to(path.anchor))
    return path.is_file() or any(found.is_file() for found in Path(path.anchor).glob(inside))


def _at(base_dir: Path, text: str) -> Path:
    return (base_dir / Path(text).expanduser()).absolute()


def _is_path(text: str) -> bool:
    return "${" not in text and not re.match(r"[A-Za-z][\w+.-]*://", text)


def _near(path: Path) -> str:
    return did_you_mean(path.name, [entry.name for entry in path.parent.iterdir()]) if path.parent.is_dir() else ""


def _function_fields(stage: Stage) -> Iterator[tuple[FieldPath, str]]:
    if isinstance(stage, PythonStage):
        yield ("function",), stage.function
    elif isinstance(stage, (DataStage, VerlStage, EvaluateStage)) and stage.reward is not None:
        yield ("reward", "function"), stage.reward.function


def _texts(value: Any, path: FieldPath = ()) -> Iterator[tuple[FieldPath, str]]:
    if isinstance(value, str):
        yield path, value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from _texts(item, (*path, key))
    elif isinstance(value, list):
        for index, item in enumerate(value):
            yield from _texts(item, (*path, index))


def _edge(stage: Any, target: str) -> FieldPath:
    for path, name, _ in stage.references():
        if name == target:
            return tuple(path)
    return ("after", stage.after.index(target))


def _cycle_from(start: str, needs: Mapping[str, Sequence[str]], done: set[str]) -> list[str] | None:
    """A cycle of two or more stages that is reached from `start`, as [a, b, a]; each stage is visited once overall."""
    trail: list[str] = []
    stack: list[tuple[str, Iterator[str]]] = []

    def enter(name: str) -> None:
        done.add(name)
        trail.append(name)
        stack.append((name, iter(needs.get(name, ()))))

    if start not in done:
        enter(start)
    while stack:
        name, rest = stack[-1]
        for target in rest:
            if target in trail and target != name:
                cycle = trail[trail.index(target) :]
                return [*cycle, target]
            if target not in done:
                enter(target)
                break
        else:
            stack.pop()
            trail.pop()
    return None


def _caught(call: Callable[[], object]) -> Iterator[UserError]:
    try:
        call()
    except UserError as error:
        yield error
