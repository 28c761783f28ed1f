"""What the stages of a pipeline are to each other: which a matrix has made many, what each hands on."""

from __future__ import annotations

import fnmatch
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from verl_workflow.spec._draft import Part
from verl_workflow.spec._fields import REFERENCE, FieldPath
from verl_workflow.spec._matrix import has_matrix
from verl_workflow.spec._model import OUTPUTS
from verl_workflow.spec._words import did_you_mean

# A field, what is wrong with it, its value, and what to do.
Mistake = tuple[FieldPath, str, Any, str]

# Outputs that are files or folders, which inputs other than `args` need.
_FILES: Mapping[str, frozenset[str]] = {
    "data": frozenset({"train", "validation", "rejected"}),
    "verl": frozenset({"model", "metrics"}),
    "evaluate": frozenset({"model", "results"}),
    "promote": frozenset({"model"}),
}
# Outputs that are numbers, by which members can be compared.
_FIGURES: Mapping[str, tuple[str, ...]] = {
    "data": ("rows.train", "rows.validation", "rows.rejected"),
    "verl": ("reward.first", "reward.last", "reward.best", "best.value", "step"),
    "evaluate": ("candidate.?*", "champion.?*", "difference.mean", "difference.low", "difference.high", "rows"),
}


@dataclass(frozen=True, kw_only=True)
class Outputs:
    """What a stage hands on. Attributes: names, files: None when they are not known before it has run."""

    names: frozenset[str] | None
    files: frozenset[str] | None


@dataclass(frozen=True, kw_only=True)
class Graph:
    """What is known by a stage's name.

    Attributes:
        combinations: of those that a matrix has made many. roots: of those too, the stage whose matrix it is.
        chosen: of those that choose, the stage whose members they choose from.
        unsure: stages whose matrix has a mistake, which is told elsewhere.
    """

    kinds: Mapping[str, str | None]
    combinations: Mapping[str, Sequence[Mapping[str, Any]]]
    roots: Mapping[str, str]
    chosen: Mapping[str, str]
    unsure: frozenset[str]

    @classmethod
    def of(cls, parts: Sequence[Part]) -> Graph:
        kinds: dict[str, str | None] = {}
        combinations: dict[str, list[Mapping[str, Any]]] = {}
        for part in parts:
            kinds[part.name] = part.kind
            if part.member is not None:
                combinations.setdefault(part.name, []).append(part.values)
            elif part.of != part.name:
                kinds.setdefault(part.of, part.kind)
                combinations.setdefault(part.of, []).append(part.body["member"].get("values", {}))
        of = {part.name: part.body.get("of") for part in parts if part.kind == "choose"}
        return cls(
            kinds=kinds,
            combinations=combinations,
            roots={part.name: part.root for part in parts if part.root is not None},
            chosen={name: stage for name, stage in of.items() if isinstance(stage, str)},
            unsure=frozenset(part.name for part in parts if has_matrix(part)),
        )

    def outputs(self, name: str) -> Outputs:
        """What `${name...}` can refer to."""
        kind = self.kinds.get(name)
        if kind != "choose":
            return Outputs(names=OUTPUTS.get(kind or ""), files=_FILES.get(kind or ""))
        of = self.chosen.get(name, "")
        chosen = self.kinds.get(of) or ""
        inner = OUTPUTS.get(chosen) if of in self.combinations else None
        return Outputs(names=None if inner is None else inner | (OUTPUTS["choose"] or set()), files=_FILES.get(chosen))

    def goes_along(self, part: Part, name: str) -> bool:
        """Whether `${name...}` in the part means one stage: that has no matrix, or a member for each of the part's."""
        if name not in self.combinations or part.name in self.unsure:
            return True
        return part.root is not None and self.roots.get(name) == part.root

    def several(self, name: str, value: str, output: str | None) -> tuple[str, str, str]:
        """What is wrong with a reference to a stage that a matrix has made many, its value, and what to do."""
        count = len(self.combinations[name])
        rest = f".{output}" if output else ""
        choosing = [f"${{{chooser}{rest}}}" for chooser, stage in self.chosen.items() if stage == name]
        remedy = f"Choose one by a stage with `kind: choose` and `of: {name}`, and refer to that"
        remedy = f"Refer to the one that is chosen, {choosing[0]}" if choosing else remedy
        what = f"the stage {name} has a matrix, and so there are {count} of it"
        return what, value, f"{remedy}; or write `matrix: {name}` here, for one stage for each of them."

    def choice(self, part: Part) -> Iterator[Mistake]:
        """What is wrong with a choose stage."""
        name, by = part.body.get("of"), part.body.get("by")
        if not isinstance(name, str) or not isinstance(by, str) or "${params" in f"{name}{by}":
            return
        if name in self.unsure:
            return
        if name not in self.combinations:
            stages = ", ".join(self.combinations) or "none"
            remedy = f"{did_you_mean(name, self.combinations)}Stages with a matrix: {stages}."
            yield ("of",), "this has to be a stage with a matrix", name, remedy
            return
        match = REFERENCE.fullmatch(by)
        if match is None and "${" in by:
            # Told where references are looked at.
            return
        stage, figure = match.groups() if match is not None else (name, by)
        if stage not in self.kinds or stage in self.unsure:
            return
        if self.combinations.get(stage) != self.combinations[name]:
            remedy = f"Refer to {name} itself, or to a stage with `matrix: {name}`."
            yield ("by",), f"{stage} does not have the members of {name}", by, remedy
            return
        kind = self.kinds[stage] or ""
        figures = _FIGURES.get(kind)
        if figures is not None and not any(fnmatch.fnmatchcase(figure or "", each) for each in figures):
            known = [each.replace("?*", "score") for each in figures]
            remedy = f"{did_you_mean(figure, known)}A stage of kind {kind} has: {', '.join(known)}."
            yield ("by",), f"this is no figure of {stage}", by, remedy
