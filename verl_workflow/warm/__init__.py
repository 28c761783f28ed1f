"""Processes that start within a moment, forked from one that has imported what takes long.

Off unless a stage says ``warm_start: true``, since the server holds about half a gigabyte of memory on the node.
"""

from verl_workflow.warm._place import SUPERVISOR, forked_for
from verl_workflow.warm._start import warm_command, warm_up

__all__ = ["SUPERVISOR", "forked_for", "warm_command", "warm_up"]
