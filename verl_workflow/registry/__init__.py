"""Versions of models, the aliases that point to them, and the promote stage."""

from verl_workflow.registry._records import AliasRecord, FileRecord, Lineage, ModelVersion
from verl_workflow.registry._registry import Registry
from verl_workflow.registry._stage import run_promote_stage

__all__ = ["AliasRecord", "FileRecord", "Lineage", "ModelVersion", "Registry", "run_promote_stage"]
