"""What a run has learnt, drawn from the files it left. Needs neither Ray nor verl."""

from verl_workflow.report._curve import Learning, Mark, learning_of
from verl_workflow.report._draw import draw

__all__ = ["Learning", "Mark", "draw", "learning_of"]
