"""The tasks of a DAG: commands and pipelines on a Ray cluster, and the registry's aliases."""

from verl_airflow._pipeline_operator import VerlPipelineOperator
from verl_airflow._ray_job_operator import RayJobOperator
from verl_airflow._registry_operators import VerlPromoteOperator, VerlRollbackOperator, model_asset

__all__ = ["RayJobOperator", "VerlPipelineOperator", "VerlPromoteOperator", "VerlRollbackOperator", "model_asset"]
