"""The evaluate stage: candidate and champion answer the same rows greedily and are scored by the same reward."""

from verl_workflow.evaluation._model import GreedyModel
from verl_workflow.evaluation._stage import run_evaluate_stage

__all__ = ["GreedyModel", "run_evaluate_stage"]
