"""Pipelines as runs: check and fix what is to be done, plan it, start it, resume it."""

from verl_workflow.pipeline._cluster import connect
from verl_workflow.pipeline._context import StageContext
from verl_workflow.pipeline._definition import Definition, define, lint_stages
from verl_workflow.pipeline._plan import PlanReport, PlanRow, plan
from verl_workflow.pipeline._run import Run, resume, start

__all__ = [
    "Definition",
    "PlanReport",
    "PlanRow",
    "Run",
    "StageContext",
    "connect",
    "define",
    "lint_stages",
    "plan",
    "resume",
    "start",
]
