"""The verl stage: real verl in a process of its own, watched, resumed from checkpoints that are whole, and exported."""

from verl_workflow.training._check import (
    check_verl_stage,
    lacking_resources,
    required_resources,
    warn_of_verl_stage,
)
from verl_workflow.training._cluster import cluster_device, cluster_nodes
from verl_workflow.training._extend import extended
from verl_workflow.training._leave import all_saved, ask_to_save
from verl_workflow.training._metrics import REWARD, Row, attempt_rows
from verl_workflow.training._stage import run_verl_stage
from verl_workflow.training._warm import warm_nodes

__all__ = [
    "REWARD",
    "Row",
    "all_saved",
    "ask_to_save",
    "attempt_rows",
    "check_verl_stage",
    "cluster_device",
    "cluster_nodes",
    "extended",
    "lacking_resources",
    "required_resources",
    "run_verl_stage",
    "warm_nodes",
    "warn_of_verl_stage",
]
