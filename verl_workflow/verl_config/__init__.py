"""verl's configuration: composed from the installed package, known by its keys and types, and judged."""

from verl_workflow.verl_config._compose import ENGINE, compose_config, select
from verl_workflow.verl_config._finding import Code, Finding, Severity
from verl_workflow.verl_config._lint import lint
from verl_workflow.verl_config._written import Setting, is_override, of_file, of_overrides

__all__ = [
    "ENGINE",
    "Code",
    "Finding",
    "Setting",
    "Severity",
    "compose_config",
    "is_override",
    "lint",
    "of_file",
    "of_overrides",
    "select",
]
