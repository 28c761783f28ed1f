"""Data stage: rows from parquet, JSON lines or a generator -> verl's parquet schema, with every refused row named."""

from verl_workflow.data._stage import run_data_stage

__all__ = ["run_data_stage"]
