"""Data stage: rows from parquet, JSON lines or a generator -> verl's parquet schema, with every refused row named."""

from verl_workflow.data._check import check_data_stage, training_rows
from verl_workflow.data._reward import try_reward
from verl_workflow.data._stage import run_data_stage

__all__ = ["check_data_stage", "run_data_stage", "training_rows", "try_reward"]
