"""The command lines, `verl-workflow` for pipelines and `ray-workflow` for any run of a storage.

Every command also speaks JSON, and says by its exit code how it went.
"""

from verl_workflow.cli._app import app, main
from verl_workflow.cli._output import ExitCode
from verl_workflow.cli._ray_workflow import main as ray_workflow_main
from verl_workflow.cli._ray_workflow import ray_workflow_app

__all__ = ["ExitCode", "app", "main", "ray_workflow_app", "ray_workflow_main"]
