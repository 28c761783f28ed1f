"""Prompt templates: Jinja over a row's columns, unable to reach or change anything else."""

from __future__ import annotations

from typing import Any


def compiled(template: str) -> Any:
    """The Jinja template; a column that a row lacks is an error when it is rendered.

    Raises:
        jinja2.TemplateSyntaxError: it does not parse.
    """
    from jinja2 import StrictUndefined
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    return ImmutableSandboxedEnvironment(undefined=StrictUndefined, keep_trailing_newline=True).from_string(template)


def template_error(template: str) -> str | None:
    """Jinja's own words for what does not parse, with the line in the template; None when all is well."""
    from jinja2 import TemplateSyntaxError

    try:
        compiled(template)
    except TemplateSyntaxError as error:
        return f"{(error.message or '').rstrip('.')} (line {error.lineno} of the template)"
    except RecursionError:
        return "it is nested too deeply"
    return None
