"""What has to hold between a pipeline's parts, and between them and the files beside it."""

from __future__ import annotations

import glob
import importlib.util
import re
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from verl_workflow.errors import ErrorCode, UserError
from verl_workflow.gates import GATE_NAMES, check_gate
from verl_workflow.spec import _functions
from verl_workflow.spec._cycles import cycle_from
from verl_workflow.spec._draft import Draft, Part, texts_in
from verl_workflow.spec._fields import FUNCTION_PATTERN, REFERENCE, FieldPath
from verl_workflow.spec._graph import Graph
from verl_workflow.spec._gym import unknown_dataset
from verl_workflow.spec._inputs import Model
from verl_workflow.spec._matrix import expand
from verl_workflow.spec._model import CLASSES, Head, Pipeline
from verl_workflow.spec._paths import located, matches
from verl_workflow.spec._template import template_error
from verl_workflow.spec._words import did_you_mean, label
from verl_workflow.spec._yaml import Places

RESERVED = frozenset({"model", "params", "matrix"})
_PACKAGE = "package:"
_URI = re.compile(r"[A-Za-z][\w+.-]*://")


def check(pipeline: Pipeline, base_dir: Path) -> list[UserError]:
    """All mistakes that are not one field's own: references, cycles, functions, files, gates.

    Args:
        base_dir: folder in which code and relative data paths lie.
    """
    parts = [
        Part(
            name=stage.name,
            kind=stage.kind,
            path=("stages", index),
            body=stage.model_dump(mode="json", warnings=False),
        )
        for index, stage in enumerate(pipeline.stages)
    ]
    places = Places(file="", spots={})
    members, errors = expand(parts, places)
    draft = Draft(head=pipeline, has_model=pipeline.model is not None, parts=members)
    return errors + check_draft(draft, base_dir, places)


def check_draft(draft: Draft, base_dir: Path, places: Places) -> list[UserError]:
    """As `check`, for what could be understood of a file with mistakes."""
    return list(_Checker(draft, Path(base_dir), places).errors())


class _Checker:
    def __init__(self, draft: Draft, base_dir: Path, places: Places) -> None:
        self.draft = draft
        self.base_dir = base_dir
        self.places = places
        self.graph = Graph.of(draft.parts)
        self.kinds = self.graph.kinds

    def errors(self) -> Iterator[UserError]:
        yield from self._names()
        if self.draft.head is not None:
            yield from self._head(self.draft.head)
        for part in self.draft.parts:
            yield from self._stage(part)
        yield from self._cycles()

    def _names(self) -> Iterator[UserError]:
        seen: dict[str, FieldPath] = {}
        for part in self.draft.parts:
            if part.name in RESERVED:
                what = f"a stage cannot be called {part.name}, for ${{{part.name}}} means the pipeline's"
                yield self._error(part, (), what, part.name, "Choose another name.", key=True)
            # The members of one stage stand in one place.
            if seen.setdefault(part.name, part.path) != part.path:
                what = "two stages have the same name"
                yield self._error(part, ("name",), what, part.name, "Rename one of them.", key=True)

    def _head(self, head: Head) -> Iterator[UserError]:
        for index, entry in enumerate(head.code):
            where = self._where(("code", index))
            yield from _caught(partial(_functions.contained, self.base_dir, entry, where))
        if head.model is not None:
            yield from self._model(head.model)

    def _model(self, model: Model) -> Iterator[UserError]:
        if model.path is not None:
            yield from self._present(("model", "path"), model.path, Path.is_dir, "the model folder does not exist")
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
        elif model.gguf is not None:
            yield from self._present(("model", "gguf"), model.gguf, Path.is_file, "the GGUF file does not exist")

    def _stage(self, part: Part) -> Iterator[UserError]:
        for path, name in part.after():
            if name == part.name:
                yield self._error(part, path, "the stage comes after itself", name, "Drop it.")
            elif name not in self.kinds:
                yield self._unknown_stage(part, path, name, name)
        for path, value in part.inputs():
            yield from self._input(part, path, value)
        for path, function in _functions_of(part.body):
            where = self._where(part.at(path))
            mistakes = list(_caught(partial(_functions.check_function, function, self.base_dir, where)))
            yield from mistakes or self._arguments(part, path, function)
        for path, pattern, many in data_paths(part.kind, part.body):
            what = "no file matches" if many and glob.has_magic(pattern) else "the file does not exist"
            yield from self._present(part.at(path), pattern, None if many else Path.exists, what)
        yield from self._stray(part)
        if part.kind == "data":
            yield from self._rows(part)
        if part.kind == "promote":
            yield from self._promotion(part)
        if part.kind == "choose":
            yield from (self._error(part, *mistake) for mistake in self.graph.choice(part))

    def _arguments(self, part: Part, path: FieldPath, function: str) -> Iterator[UserError]:
        is_step = path == ("function",)
        given = part.body.get("args", {}) if is_step else part.body["reward"].get("kwargs", {})
        check = _functions.check_step if is_step else _functions.check_reward
        where = self._where(part.at(("args",) if is_step else path))
        if isinstance(given, Mapping):
            yield from _caught(lambda: check(function, self.base_dir, given, where))

    def _rows(self, part: Part) -> Iterator[UserError]:
        """How a data stage makes its rows: the template and the generators."""
        prompt = part.body.get("prompt")
        # A param that could not be put in has been told already.
        if isinstance(prompt, str) and "${params" not in prompt:
            problem = template_error(prompt)
            if problem is not None:
                yield self._error(
                    part, ("prompt",), f"this is no Jinja template: {problem}", prompt, "Mend the template."
                )
        for field in ("source", "validation"):
            source = part.body.get(field)
            gym = source.get("reasoning_gym") if isinstance(source, Mapping) else None
            dataset = gym.get("dataset") if isinstance(gym, Mapping) else None
            others = unknown_dataset(dataset) if isinstance(dataset, str) and "${params" not in dataset else None
            if others is not None:
                what = "reasoning-gym has no such data set"
                remedy = f"{did_you_mean(dataset, others)}See reasoning_gym.factory.DATASETS."
                yield self._error(part, (field, "reasoning_gym", "dataset"), what, dataset, remedy)

    def _stray(self, part: Part) -> Iterator[UserError]:
        """References in fields that nothing resolves."""
        reward = part.body.get("reward")
        kwargs = reward.get("kwargs") if isinstance(reward, Mapping) else None
        for path, value in texts_in(kwargs, ("reward", "kwargs")):
            match = REFERENCE.fullmatch(value)
            if match is not None and match.group(1) in self.kinds:
                what = "a reward cannot refer to a stage's output"
                yield self._error(part, path, what, value, "Write the value itself.")

    def _input(self, part: Part, path: FieldPath, value: str) -> Iterator[UserError]:
        # A param or a value of a matrix that could not be put in has been told already.
        if "${" not in value or "${params" in value or "${matrix" in value:
            return
        match = REFERENCE.fullmatch(value)
        if match is None:
            what = "a reference has to be the whole value" if REFERENCE.search(value) else "this is no reference"
            yield self._error(part, path, what, value, "Write it like ${stage.output}.")
            return
        name, output = match.groups()
        if name == "model":
            yield from self._model_reference(part, path, value, output)
        elif name == part.name:
            yield self._error(part, path, "the stage refers to itself", value, "Refer to a stage before it.")
        elif name not in self.kinds:
            yield self._unknown_stage(part, path, name, value)
        elif part.kind != "choose" and not self.graph.goes_along(part, name):
            yield self._error(part, path, *self.graph.several(name, value, output))
        elif part.kind != "choose":
            yield from self._output(part, path, value, name, output)

    def _model_reference(self, part: Part, path: FieldPath, value: str, output: str | None) -> Iterator[UserError]:
        if output is not None:
            yield self._error(part, path, "the pipeline's model has no outputs", value, "Write ${model}.")
        elif not self.draft.has_model:
            what = f"{self._label(part, path)} is {value}, and the pipeline has no `model`"
            remedy = "Add `model:` to the pipeline, or name a folder or another stage's model."
            yield self._error(part, path, what, None, remedy, whole=True)

    def _output(self, part: Part, path: FieldPath, value: str, name: str, output: str | None) -> Iterator[UserError]:
        handed = self.graph.outputs(name)
        outputs, files = handed.names, handed.files
        first, _, rest = (output or "").partition(".")
        if outputs is not None and output is not None and first not in outputs:
            kind = self.kinds[name]
            remedy = f"{did_you_mean(first, outputs)}A stage of kind {kind} has: {', '.join(sorted(outputs))}."
            yield self._error(part, path, f"the stage {name} has no output {first!r}", value, remedy)
        elif path[0] in {"args", "evaluation"} or files is None:
            return
        elif not rest and first not in files:
            what = f"{value} is no file" if output else "the reference names no output"
            remedy = f"Files of {name}: {', '.join(f'${{{name}.{each}}}' for each in sorted(files))}."
            yield self._error(part, path, what, value, remedy)

    def _promotion(self, part: Part) -> Iterator[UserError]:
        evaluation, gate = part.body.get("evaluation"), part.body.get("gate")
        match = REFERENCE.fullmatch(evaluation) if isinstance(evaluation, str) else None
        # A stage that does not exist, or is of no known kind, has been told already.
        unsure = match is not None and self.kinds.get(match.group(1)) is None and match.group(1) not in RESERVED
        judged = None if match is None else self.graph.chosen.get(match.group(1)) or match.group(1)
        right = match is not None and match.group(2) is None and self.kinds.get(judged or "") == "evaluate"
        if isinstance(evaluation, str) and not right and not unsure:
            stages = [f"${{{name}}}" for name in self.kinds if self._judges(name)]
            remedy = f"Evaluate stages: {', '.join(stages)}." if stages else "Add a stage of kind evaluate."
            yield self._error(part, ("evaluation",), "this has to be an evaluate stage", evaluation, remedy)
        if match is not None and right:
            yield from self._opponent(part, judged or "")
        if isinstance(gate, str):
            try:
                check_gate(gate, GATE_NAMES)
            except UserError as error:
                where = self._where(part.at(("gate",)))
                yield UserError(error.code, error.what, where=where, value=error.value, remedy=error.remedy)

    def _judges(self, name: str) -> bool:
        """Whether promotion can refer to it: an evaluate stage, or the choice among some."""
        many = name in self.graph.combinations
        return self.kinds.get(self.graph.chosen.get(name) or name) == "evaluate" and not many

    def _opponent(self, part: Part, evaluation: str) -> Iterator[UserError]:
        """The champion that is replaced has to be the one that was met: else the second run fails, after training."""
        registry, alias = part.body.get("registry"), part.body.get("alias", "champion")
        met = next(each for each in self.draft.parts if each.of == evaluation).body.get("champion")
        if alias != "champion" or not isinstance(registry, str) or met == registry or "${" in f"{registry}{met}":
            return
        compared = f"the champion of {met}" if met else "no champion"
        what = f"{evaluation} compares with {compared}, so that no later run could replace the champion of {registry}"
        remedy = f"Write `champion: {registry}` in the stage {evaluation}; while there is none, nothing is compared."
        yield self._error(part, ("registry",), what, registry, remedy)

    def _cycles(self) -> Iterator[UserError]:
        edges: dict[str, dict[str, FieldPath]] = {}
        for part in self.draft.parts:
            edges.setdefault(part.name, {}).update(part.edges())
        needs = {name: [target for target in targets if target in edges] for name, targets in edges.items()}
        done: set[str] = set()
        for start in needs:
            cycle = cycle_from(start, needs, done)
            if cycle is not None:
                # Told from the stage that is written first.
                order = [list(needs).index(name) for name in cycle]
                first = order.index(min(order))
                cycle = [*cycle[first:], *cycle[:first], cycle[first]]
                part = next(part for part in self.draft.parts if part.name == cycle[0])
                yield UserError(
                    ErrorCode.SPEC_INVALID,
                    f"the stages wait for each other: {' -> '.join(cycle)}",
                    where=self._where(part.at(edges[part.name][cycle[1]])),
                    remedy="Drop one of these references.",
                )

    def _unknown_stage(self, part: Part, path: FieldPath, name: str, value: str) -> UserError:
        others = [each for each in self.kinds if each != part.name]
        remedy = f"{did_you_mean(name, others)}Stages: {', '.join(others) or 'no other'}."
        return self._error(part, path, f"there is no stage {name!r}", value, remedy)

    def _present(
        self, path: FieldPath, value: str, suits: Callable[[Path], bool] | None, what: str
    ) -> Iterator[UserError]:
        """Tell `what` unless `value` leads to something that suits (None: the path or glob to any file)."""
        where = self._where(path)
        try:
            full = located(self.base_dir, value, where)
            if not (suits(full) if suits is not None else any(matches(self.base_dir, value, where))):
                yield self._missing(path, what, value, full)
        except UserError as error:
            yield error

    def _missing(self, path: FieldPath, what: str, value: str, full: Path) -> UserError:
        shown = "" if str(full) == value else f", looked for at {full}"
        remedy = f"{_near(full)}Relative paths start at the folder of the pipeline file."
        return UserError(ErrorCode.FILE_MISSING, f"{what}{shown}", where=self._where(path), value=value, remedy=remedy)

    def _error(
        self, part: Part, path: FieldPath, what: str, value: Any, remedy: str, *, key: bool = False, whole: bool = False
    ) -> UserError:
        where = self._where(part.at(path), key=key)
        shown = what if whole or not path else f"{self._label(part, path)}: {what}"
        return UserError(ErrorCode.SPEC_INVALID, shown, where=where, value=value, remedy=remedy)

    def _label(self, part: Part, path: FieldPath) -> str:
        return label(("stages", part.name, *path))

    def _where(self, path: FieldPath, *, key: bool = False) -> str:
        names = {part.path[1]: part.name for part in self.draft.parts if isinstance(part.path[1], int)}
        return self.places.at(path, key=key) or label(path, names)


def data_paths(kind: str | None, body: Mapping[str, Any]) -> Iterator[tuple[FieldPath, str, bool]]:
    """The literal data files and folders a stage names: (path of the field, what is written, whether globs count)."""
    fields: list[tuple[FieldPath, Any]] = []
    if kind == "data":
        for name in ("source", "validation"):
            source = body.get(name)
            if isinstance(source, Mapping):
                fields += [((name, key), source.get(key)) for key in ("parquet", "jsonl")]
    elif kind in {"verl", "evaluate"}:
        fields = [((name,), body.get(name)) for name in CLASSES[kind].INPUTS]
    for path, value in fields:
        for inner, text in texts_in(value, path):
            if "${" not in text and not _URI.match(text):
                yield inner, text, kind == "data"


def _near(path: Path) -> str:
    return did_you_mean(path.name, [entry.name for entry in path.parent.iterdir()]) if path.parent.is_dir() else ""


def _functions_of(body: Mapping[str, Any]) -> Iterator[tuple[FieldPath, str]]:
    reward = body.get("reward")
    fields: list[tuple[FieldPath, Any]] = [(("function",), body.get("function"))]
    if isinstance(reward, Mapping):
        fields.append((("reward", "function"), reward.get("function")))
    for path, value in fields:
        if isinstance(value, str) and re.match(FUNCTION_PATTERN, value) and "${" not in value:
            yield path, value


def _caught(call: Callable[[], object]) -> Iterator[UserError]:
    try:
        call()
    except UserError as error:
        yield error
