"""Metrics of trainings shown in MLflow, Weights & Biases and TensorBoard, apart from the training itself."""

from verl_workflow.trackers._facts import Facts, kept
from verl_workflow.trackers._mirror import behind, mirrored, missing_clients
from verl_workflow.trackers._sender import Sender

__all__ = ["Facts", "Sender", "behind", "kept", "mirrored", "missing_clients"]
