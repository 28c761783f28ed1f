"""Durable, resumable post-training pipelines: data, verl, evaluation and promotion in one run on Ray.

Importing this costs next to nothing: what it offers is loaded when it is first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from verl_workflow.errors import ErrorCode as ErrorCode
    from verl_workflow.errors import FencedError as FencedError
    from verl_workflow.errors import UserError as UserError
    from verl_workflow.errors import UserErrors as UserErrors
    from verl_workflow.errors import VerlWorkflowError as VerlWorkflowError
    from verl_workflow.spec import Change as Change
    from verl_workflow.spec import ChooseStage as ChooseStage
    from verl_workflow.spec import DataStage as DataStage
    from verl_workflow.spec import Deadlines as Deadlines
    from verl_workflow.spec import Document as Document
    from verl_workflow.spec import EvaluateStage as EvaluateStage
    from verl_workflow.spec import FailureClass as FailureClass
    from verl_workflow.spec import Guard as Guard
    from verl_workflow.spec import KeepBest as KeepBest
    from verl_workflow.spec import MlflowTracker as MlflowTracker
    from verl_workflow.spec import Model as Model
    from verl_workflow.spec import Param as Param
    from verl_workflow.spec import Pipeline as Pipeline
    from verl_workflow.spec import Placement as Placement
    from verl_workflow.spec import Pool as Pool
    from verl_workflow.spec import PromoteStage as PromoteStage
    from verl_workflow.spec import PythonStage as PythonStage
    from verl_workflow.spec import ReasoningGym as ReasoningGym
    from verl_workflow.spec import Retry as Retry
    from verl_workflow.spec import Reward as Reward
    from verl_workflow.spec import Source as Source
    from verl_workflow.spec import Storage as Storage
    from verl_workflow.spec import TensorboardTracker as TensorboardTracker
    from verl_workflow.spec import TrainingRetry as TrainingRetry
    from verl_workflow.spec import VerlStage as VerlStage
    from verl_workflow.spec import WandbTracker as WandbTracker
    from verl_workflow.spec import dump as dump
    from verl_workflow.spec import load as load
    from verl_workflow.spec import resolve as resolve

_ERRORS = ("ErrorCode", "FencedError", "UserError", "UserErrors", "VerlWorkflowError")
_SPEC = (
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
    "Storage",
    "TensorboardTracker",
    "TrainingRetry",
    "VerlStage",
    "WandbTracker",
    "dump",
    "load",
    "resolve",
)
_HOMES = {**dict.fromkeys(_ERRORS, "verl_workflow.errors"), **dict.fromkeys(_SPEC, "verl_workflow.spec")}

__all__ = [*_ERRORS, *_SPEC]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
