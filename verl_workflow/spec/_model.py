"""What a pipeline is: the classes behind the YAML, usable from Python as they are.

Fields that take another stage's output hold a reference, ``${stage.output}``; the edges of the graph follow from them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import (
    BeforeValidator,
    Discriminator,
    Field,
    PositiveInt,
    Tag,
    model_validator,
)

from verl_workflow.spec._fields import (
    Cpus,
    FieldPath,
    Function,
    Gpus,
    Input,
    Inputs,
    JsonObject,
    Name,
    Strict,
    references_in,
    shape,
)
from verl_workflow.spec._params import Param

# What each kind of stage hands on; None: known only when it has run.
OUTPUTS: Mapping[str, frozenset[str] | None] = {
    "data": frozenset({"train", "validation", "rejected", "rows"}),
    "verl": frozenset({"model", "checkpoint", "metrics", "step", "reward"}),
    "evaluate": frozenset({"model", "candidate", "champion", "difference", "rows", "data", "results"}),
    "promote": frozenset({"promoted", "reason", "version", "model"}),
    "python": None,
}


class Storage(Strict):
    """Where a run lives.

    Attributes:
        uri: control data (journal, registry): a path, ``s3://``, ``gs://``, ``az://``.
        artifacts: folder for parquet files and checkpoints on a file system all nodes share; by default `uri` when that
            is a local path, and required otherwise.
    """

    uri: str = ".verl-workflow"
    artifacts: str | None = None


class Model(Strict):
    """The model to train: exactly one of the three.

    Attributes:
        builtin: ``tiny``, a two-layer byte-level model of 0.1 million parameters made on the spot.
        path: a folder in Hugging Face format.
        gguf: a GGUF file, a path or ``package:<import name>`` for the one inside an installed package; exported once to
            safetensors.
    """

    builtin: Literal["tiny"] | None = None
    path: str | None = None
    gguf: str | None = None

    @model_validator(mode="after")
    def _one_source(self) -> Model:
        if sum(value is not None for value in (self.builtin, self.path, self.gguf)) != 1:
            raise ValueError("give exactly one of builtin, path and gguf")
        return self


class Retry(Strict):
    """How often a stage is tried in all when it fails for a reason that may pass."""

    attempts: PositiveInt = 3
    backoff: Annotated[float, Field(ge=0)] = 2.0


class Reward(Strict):
    """A reward as verl calls it: ``(data_source, solution_str, ground_truth, extra_info, **kwargs)`` -> float or a dict
    with ``score``.

    Attributes:
        function: ``file.py:function`` beside the pipeline file, or ``package.module:function``.
        kwargs: handed on to each call.
    """

    function: Function
    kwargs: JsonObject = {}


class _Stage(Strict):
    # Fields that may hold references: their outputs must exist before the stage runs. Anywhere else ``${...}`` is text
    # (in `overrides` it is verl's own interpolation).
    INPUTS: ClassVar[tuple[str, ...]] = ()

    name: Name
    after: list[Name] = []
    retry: Retry = Retry()
    timeout: Annotated[float, Field(gt=0)] | None = None

    def references(self) -> Iterator[tuple[FieldPath, str, str | None]]:
        """All references in the stage's inputs: (path of the field, stage name, output or None)."""
        fields = self.model_dump(mode="json", include=set(self.INPUTS), warnings=False)
        for field in self.INPUTS:
            yield from references_in(fields[field], (field,))

    def needs(self) -> frozenset[str]:
        """Names of the stages that must have succeeded first."""
        named = {stage for _, stage, _ in self.references() if stage not in {"model", "params"}}
        return frozenset(named | set(self.after))


class ReasoningGym(Strict):
    """Questions from a procedural generator of reasoning-gym."""

    dataset: str
    size: PositiveInt
    seed: int = 0
    config: JsonObject = {}


class Source(Strict):
    """Where rows come from: exactly one of the three.

    Attributes:
        parquet, jsonl: files, globs or references; relative paths are beside the pipeline file.
        reasoning_gym: rows made by the package reasoning-gym.
    """

    parquet: Inputs | None = None
    jsonl: Inputs | None = None
    reasoning_gym: ReasoningGym | None = None

    @model_validator(mode="after")
    def _one_source(self) -> Source:
        if sum(value is not None for value in (self.parquet, self.jsonl, self.reasoning_gym)) != 1:
            raise ValueError("give exactly one of parquet, jsonl and reasoning_gym")
        return self


class DataStage(_Stage):
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


class VerlStage(_Stage):
    """A training run of verl.

    Attributes:
        algorithm: ``grpo``, or ``ppo`` (GAE with a critic and a KL reference).
        model: what to start from: ``${model}``, another stage's model or a folder.
        train, validation: parquet in verl's schema.
        steps: training steps planned; the stage succeeds only when the last one was reached.
        batch_size: prompts a step. rollouts: answers for each prompt (GRPO needs 2 or more).
        max_prompt_length, max_response_length: in tokens.
        learning_rate, critic_learning_rate, kl_coef: as in verl; `kl_coef` 0 turns the KL loss off for GRPO.
        save_every, test_every: in steps. keep: checkpoints kept (2 or more).
        device: ``auto`` takes CUDA when the cluster has GPUs and else the CPU platform.
        rollout: ``hf`` (transformers), ``vllm`` or ``sglang``.
        nodes, gpus_per_node: the world size; on the CPU one rank.
        overrides: verl's own keys, dotted or nested; they win over the fields above. Those of what the run decides (its
            model, data, reward, steps, device, checkpoints) are refused.
        seed: of data order and sampling.
    """

    INPUTS: ClassVar[tuple[str, ...]] = ("model", "train", "validation")

    kind: Literal["verl"] = "verl"
    algorithm: Literal["grpo", "ppo"] = "grpo"
    model: Input = "${model}"
    train: Input
    validation: Input
    reward: Reward
    steps: PositiveInt
    batch_size: PositiveInt
    rollouts: PositiveInt = 4
    max_prompt_length: PositiveInt = 512
    max_response_length: PositiveInt = 512
    learning_rate: Annotated[float, Field(gt=0)] = 1e-6
    critic_learning_rate: Annotated[float, Field(gt=0)] = 1e-5
    kl_coef: Annotated[float, Field(ge=0)] = 0.001
    temperature: Annotated[float, Field(gt=0)] = 1.0
    save_every: PositiveInt | None = None
    test_every: PositiveInt | None = None
    keep: Annotated[int, Field(ge=2)] = 2
    device: Literal["auto", "cpu", "cuda"] = "auto"
    rollout: Literal["hf", "vllm", "sglang"] = "hf"
    nodes: PositiveInt = 1
    gpus_per_node: PositiveInt = 1
    seed: int = 1
    overrides: JsonObject = {}

    @model_validator(mode="after")
    def _consistent(self) -> VerlStage:
        # Values that are params are checked once they are known.
        if self.algorithm == "grpo" and isinstance(self.rollouts, int) and self.rollouts < 2:
            raise ValueError("grpo compares answers to one prompt: rollouts must be 2 or more")
        attempts = self.retry.attempts if isinstance(self.retry, Retry) else 1
        if isinstance(attempts, int) and attempts > 1 and self.save_every is None:
            raise ValueError(
                f"retry.attempts is {attempts} but nothing is saved to resume from: "
                "set save_every to 1 or more, or retry.attempts to 1"
            )
        return self


class EvaluateStage(_Stage):
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


class PromoteStage(_Stage):
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


class PythonStage(_Stage):
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
    | Annotated[PythonStage, Tag("python")],
    Discriminator(_kind),
]


CLASSES: Mapping[str, type[DataStage | VerlStage | EvaluateStage | PromoteStage | PythonStage]] = {
    "data": DataStage,
    "verl": VerlStage,
    "evaluate": EvaluateStage,
    "promote": PromoteStage,
    "python": PythonStage,
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
