"""The command line, `verl-workflow`: every command also speaks JSON, and says by its exit code how it went."""

from verl_workflow.cli._app import app, main
from verl_workflow.cli._output import ExitCode

__all__ = ["ExitCode", "app", "main"]
