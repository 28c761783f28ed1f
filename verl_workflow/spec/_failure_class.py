"""The classes of failure of a training: what `retry.budgets` names, and what a failure is filed under."""

from __future__ import annotations

import enum


class FailureClass(str, enum.Enum):
    """Why an attempt at a verl stage ended without success.

    CONFIGURATION, DATA, REWARD: what the user wrote. CAPACITY: the cluster had no room. MEMORY_GPU, MEMORY_HOST,
    MEMORY_SAVE: memory ran out on the accelerator, on the node, or while a checkpoint was saved. DISK: no space.
    INFRASTRUCTURE: a process, node or connection was lost. STALL: no step within its time. NUMERIC: losses or guarded
    metrics went wrong. CHECKPOINT: what was to be resumed from could not be loaded. TRACKER: verl's own tracking
    failed. CANCELLED: somebody stopped it. UNKNOWN: none of these could be shown.
    """

    CONFIGURATION = "configuration"
    DATA = "data"
    REWARD = "reward"
    CAPACITY = "capacity"
    MEMORY_GPU = "memory.gpu"
    MEMORY_HOST = "memory.host"
    MEMORY_SAVE = "memory.save"
    DISK = "disk"
    INFRASTRUCTURE = "infrastructure"
    STALL = "stall"
    NUMERIC = "numeric"
    CHECKPOINT = "checkpoint"
    TRACKER = "tracker"
    CANCELLED = "cancelled"
    UNKNOWN = "unknown"
