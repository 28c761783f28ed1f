"""What a pipeline is: written as YAML or with these classes, checked, and turned from one into the other."""

from verl_workflow.spec._check import check
from verl_workflow.spec._dump import dump
from verl_workflow.spec._fields import REFERENCE
from verl_workflow.spec._load import Document, load, resolve
from verl_workflow.spec._model import (
    OUTPUTS,
    DataStage,
    EvaluateStage,
    Model,
    Pipeline,
    PromoteStage,
    PythonStage,
    ReasoningGym,
    Retry,
    Reward,
    Source,
    Stage,
    Storage,
    VerlStage,
)
from verl_workflow.spec._params import Param
from verl_workflow.spec._python import pipeline_from_python
from verl_workflow.spec._schema import json_schema

__all__ = [
    "OUTPUTS",
    "REFERENCE",
    "DataStage",
    "Document",
    "EvaluateStage",
    "Model",
    "Param",
    "Pipeline",
    "PromoteStage",
    "PythonStage",
    "ReasoningGym",
    "Retry",
    "Reward",
    "Source",
    "Stage",
    "Storage",
    "VerlStage",
    "check",
    "dump",
    "json_schema",
    "load",
    "pipeline_from_python",
    "resolve",
]
