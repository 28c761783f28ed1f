"""What a pipeline is: written as YAML or with these classes, checked, and turned from one into the other."""

from verl_workflow.spec._check import check
from verl_workflow.spec._choose import ChooseStage
from verl_workflow.spec._dump import dump
from verl_workflow.spec._failure_class import FailureClass
from verl_workflow.spec._fields import REFERENCE
from verl_workflow.spec._inputs import Model, ReasoningGym, Reward, Source, Storage
from verl_workflow.spec._load import Document, load, resolve
from verl_workflow.spec._model import (
    OUTPUTS,
    DataStage,
    EvaluateStage,
    Pipeline,
    PromoteStage,
    PythonStage,
    Stage,
)
from verl_workflow.spec._params import Param
from verl_workflow.spec._placement import Placement, Pool
from verl_workflow.spec._python import pipeline_from_python
from verl_workflow.spec._retry import Change, TrainingRetry
from verl_workflow.spec._schema import json_schema
from verl_workflow.spec._stage import Retry
from verl_workflow.spec._supervision import Deadlines, Guard
from verl_workflow.spec._trackers import MlflowTracker, TensorboardTracker, WandbTracker
from verl_workflow.spec._training import KeepBest, VerlStage

__all__ = [
    "OUTPUTS",
    "REFERENCE",
    "Change",
    "ChooseStage",
    "DataStage",
    "Deadlines",
    "Document",
    "EvaluateStage",
    "FailureClass",
    "Guard",
    "KeepBest",
    "MlflowTracker",
    "Model",
    "Param",
    "Pipeline",
    "Placement",
    "Pool",
    "PromoteStage",
    "PythonStage",
    "ReasoningGym",
    "Retry",
    "Reward",
    "Source",
    "Stage",
    "Storage",
    "TensorboardTracker",
    "TrainingRetry",
    "VerlStage",
    "WandbTracker",
    "check",
    "dump",
    "json_schema",
    "load",
    "pipeline_from_python",
    "resolve",
]
