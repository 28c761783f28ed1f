"""All rules, in their order: where two match the same line, the first decides."""

from __future__ import annotations

from verl_workflow.training.failures import _machine_rules as machine
from verl_workflow.training.failures import _stage_rules as stage
from verl_workflow.training.failures._rule import Rule

RULES: tuple[Rule, ...] = (
    *machine.ENVIRONMENT,
    *machine.SHARED_MEMORY_FULL,
    *machine.DISK_FULL,
    *machine.MEMORY,
    *machine.TAKEN_AWAY,
    *machine.ROOM,
    *stage.TRACKERS,
    *machine.FILES,
    *stage.NUMBERS,
    *stage.ROWS,
    *machine.LOST,
    *stage.LEFT,
)
