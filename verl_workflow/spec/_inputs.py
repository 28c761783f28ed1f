"""What stages are given besides each other: models, rewards, rows, and where a run lives."""

from __future__ import annotations

from typing import Literal

from pydantic import PositiveInt, model_validator

from verl_workflow.spec._fields import Function, Inputs, JsonObject, Strict


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


class Reward(Strict):
    """A reward as verl calls it: ``(data_source, solution_str, ground_truth, extra_info, **kwargs)`` -> float or a dict
    with ``score``.

    Attributes:
        function: ``file.py:function`` beside the pipeline file, or ``package.module:function``.
        kwargs: handed on to each call.
    """

    function: Function
    kwargs: JsonObject = {}


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
