"""Why a training failed: its class, the lines that show it, and what to do."""

from verl_workflow.spec._failure_class import FailureClass
from verl_workflow.training.failures._advice import ADVICE, RETRYABLE
from verl_workflow.training.failures._chain import error_chain
from verl_workflow.training.failures._diagnose import diagnose
from verl_workflow.training.failures._failure import Failure

__all__ = ["ADVICE", "RETRYABLE", "Failure", "FailureClass", "diagnose", "error_chain"]
