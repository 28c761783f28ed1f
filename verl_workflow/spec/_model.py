"""What a pipeline is: the classes behind the YAML, usable from Python as they are.

Fields that take another stage's output hold a reference, ``${stage.output}``; the edges of the graph follow from them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Discriminator, Field, PositiveInt, Tag

from verl_workflow.spec._choose import ChooseStage
from verl_workflow.spec._fields import Cpus, Function, Gpus, Input, JsonObject, Name, Strict, shape
from verl_workflow.spec._inputs import Model, Reward, Source, Storage
from verl_workflow.spec._params import Param
from verl_workflow.spec._stage import BaseStage, MatrixStage
from verl_workflow.spec._training import VerlStage

# What each kind of stage hands on; None: known only when it has run. What is chosen hands on its own outputs as well.
OUTPUTS: Mapping[str, frozenset[str] | None] = {
    "data": frozenset({"train", "validation", "rejected", "rows"}),
    "verl": frozenset({"model", "checkpoint", "best", "metrics", "step", "reward", "warnings", "extended"}),
    "evaluate": frozenset({"model", "candidate", "champion", "difference", "rows", "data", "results"}),
    "promote": frozenset({"promoted", "reason", "version", "model"}),
    "python": None,
    "choose": frozenset({"winner", "values", "figure", "table"}),
}


class DataStage(MatrixStage):
    """Rows -> verl's parquet schema, train and validation.

    Attributes:
        source: all rows, or the training rows when `validation` is a source.
        validation: how many rows to hold out (taken before training rows, never in both), or a source of their own.
        prompt: Jinja template for the user's message over the row's columns, when rows have no chat in `prompt`.
        answer: column that holds the right answer, when rows have no `reward_model.ground_truth`.
        data_source: value of verl's column of that name, when rows have none; by default the source's name.
        system: a system message put first.
        reward: tried on one row before anything is trained.
        max_rejected: share of rows (0-1) that may be rejected before the stage fails.
    """

    INPUTS: ClassVar[tuple[str, ...]] = ("source", "validation")

    kind: Literal["data"] = "data"
    source: Source
    validation: Annotated[
        Annotated[PositiveInt, Tag("plain")] | Annotated[PositiveInt, Tag("list")] | Annotated[Source, Tag("mapping")],
        Discriminator(shape),
    ]
    prompt: str | None = None
    answer: str | None = None
    data_source: str | None = None
    system: str | None = None
    reward: Reward | None = None
    max_rejected: Annotated[float, Field(ge=0, le=1)] = 0.0


class EvaluateStage(MatrixStage):
    """Candidate and champion answer the same rows greedily and are scored by the same reward.

    Attributes:
        model: the candidate. data: parquet in verl's schema.
        champion: name of a model in the registry; its alias `champion` is the opponent, if there is one.
        limit: rows used, from the start of the file. batch_size: rows generated at once.
    """

    INPUTS: ClassVar[tuple[str, ...]] = ("model", "data")

    kind: Literal["evaluate"] = "evaluate"
    model: Input
    champion: Name | None = None
    data: Input
    reward: Reward
    limit: PositiveInt | None = None
    max_prompt_length: PositiveInt = 512
    max_response_length: PositiveInt = 512
    batch_size: PositiveInt = 32


class PromoteStage(BaseStage):
    """Registers the model as a new version and moves the alias when the gate holds.

    Attributes:
        registry: name of the model in the registry. With the alias `champion` it is also the evaluation's `champion`.
        evaluation: an evaluate stage, ``${evaluate}``.
        gate: expression over the evaluation's figures, for example
            ``candidate.score >= 0.5 and (champion is None or candidate.score > champion.score)``.
        alias: moved to the new version.
    """

    INPUTS: ClassVar[tuple[str, ...]] = ("evaluation",)

    kind: Literal["promote"] = "promote"
    registry: Name
    evaluation: Input
    gate: str = "champion is None or candidate.score > champion.score"
    alias: Name = "champion"


class PythonStage(MatrixStage):
    """Any importable function: called with `args`, it returns JSON.

    A parameter named ``context`` is handed the `StageContext`. The function runs in ``context.attempt_dir``; what it
    writes there stays; the pipeline's code and the files listed under ``code`` are in ``context.code_dir``.

    Attributes:
        cpus, gpus: what Ray sets aside for it, in units of 0.0001; more than one GPU is a whole number.
    """

    INPUTS: ClassVar[tuple[str, ...]] = ("args",)

    kind: Literal["python"] = "python"
    function: Function
    args: JsonObject = {}
    cpus: Cpus = 1
    gpus: Gpus = 0


def _kind(value: Any) -> Any:
    return value.get("kind") if isinstance(value, Mapping) else getattr(value, "kind", None)


Stage = Annotated[
    Annotated[DataStage, Tag("data")]
    | Annotated[VerlStage, Tag("verl")]
    | Annotated[EvaluateStage, Tag("evaluate")]
    | Annotated[PromoteStage, Tag("promote")]
    | Annotated[PythonStage, Tag("python")]
    | Annotated[ChooseStage, Tag("choose")],
    Discriminator(_kind),
]


CLASSES: Mapping[str, type[DataStage | VerlStage | EvaluateStage | PromoteStage | PythonStage | ChooseStage]] = {
    "data": DataStage,
    "verl": VerlStage,
    "evaluate": EvaluateStage,
    "promote": PromoteStage,
    "python": PythonStage,
    "choose": ChooseStage,
}


def _no_truth(value: Any) -> Any:
    # Python takes True for 1.
    if isinstance(value, bool):
        raise ValueError("should be 1, the one version of the format there is")
    return value


class Head(Strict):
    """A pipeline less its stages: validated apart from them, so that mistakes in both are found in one pass."""

    version: Annotated[Literal[1], BeforeValidator(_no_truth)] = 1
    name: Name
    description: str = ""
    params: dict[Name, Param] = {}
    storage: Storage = Storage()
    model: Model | None = None
    code: list[Input] = []


class Pipeline(Head):
    """A whole pipeline. `params` are already substituted in what `load` returns.

    Attributes:
        code: more files and folders, relative to the pipeline file, that travel with the run besides those its
            functions name.
    """

    stages: Annotated[list[Stage], Field(min_length=1)]

    def stage(self, name: str) -> Any:
        """The stage of that name; KeyError when there is none."""
        for stage in self.stages:
            if stage.name == name:
                return stage
        raise KeyError(name)

    def members(self, name: str) -> list[Any]:
        """The stages that the matrix of that stage has made, in their order; empty when there are none."""
        return [stage for stage in self.stages if (made := getattr(stage, "member", None)) and made.of == name]
