"""`lint`: what is wrong with a configuration of verl, for people who use verl alone too."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from verl_workflow.cli import _options
from verl_workflow.cli._output import ExitCode, print_json, print_line, reported
from verl_workflow.errors import ErrorCode, UserError

if TYPE_CHECKING:
    from verl_workflow.verl_config import Finding, Setting


def lint(
    sources: Annotated[
        list[str],
        typer.Argument(
            metavar="FILE|OVERRIDE...",
            help="A YAML file or a shell script with verl's settings, overrides (key=value), or both; or a pipeline.",
            show_default=False,
        ),
    ],
    rows: Annotated[
        int | None, typer.Option("--rows", min=1, metavar="N", help="Rows to train on.", show_default=False)
    ] = None,
    strict: Annotated[bool, typer.Option("--strict", help="Warnings fail, too.")] = False,
    as_json: _options.Json = False,
) -> None:
    """Check verl's settings against the installed verl: no GPU, and nothing is started. Exit code 2: errors."""
    with reported(as_json):
        from verl_workflow.verl_config import Severity, is_override, of_overrides

        files = [word for word in sources if not is_override(word)]
        overrides = of_overrides([word for word in sources if is_override(word)])
        if len(files) == 1 and not overrides and _is_pipeline(Path(files[0])):
            found = _of_pipeline(files[0])
        else:
            found = _of_settings(files, overrides, rows)
        errors = sum(finding.severity is Severity.ERROR for finding in found)
        warnings = len(found) - errors
        if as_json:
            print_json({"errors": errors, "warnings": warnings, "findings": [each.to_json() for each in found]})
        else:
            for finding in found:
                print_line(_line(finding))
            print_line(f"{_count(errors, 'error')}, {_count(warnings, 'warning')}" if found else "nothing is wrong")
        if errors or (strict and warnings):
            raise typer.Exit(ExitCode.USER_ERROR)


def _of_settings(files: list[str], overrides: list[Setting], rows: int | None) -> list[Finding]:
    from verl_workflow.verl_config import lint as judge
    from verl_workflow.verl_config import of_file

    settings: list[Setting] = []
    for file in files:
        path = Path(file)
        remedy = "Name a YAML file of settings or a script that calls verl, or write overrides as key=value."
        if not path.exists():
            raise UserError(ErrorCode.FILE_MISSING, "there is no such file", where=file, remedy=remedy)
        if not path.is_file():
            raise UserError(ErrorCode.USAGE_INVALID, "this is no file", where=file, remedy=remedy)
        settings += of_file(path)
    return judge([*settings, *overrides], rows=rows)


def _of_pipeline(file: str) -> list[Finding]:
    """What its stages' settings are warned of; its errors are raised, as `validate` does."""
    from verl_workflow.pipeline import define, lint_stages
    from verl_workflow.spec import load

    document = load(file, {})
    define(document, storage=None)
    return lint_stages(document)


def _is_pipeline(path: Path) -> bool:
    from verl_workflow.spec._yaml import read_yaml

    if path.suffix == ".py":
        return True
    if path.suffix not in {".yaml", ".yml"} or not path.is_file():
        return False
    return "stages" in read_yaml(path, str(path)).data


def _line(finding: Any) -> str:
    place = f"{finding.where}: " if finding.where else ""
    end = "" if finding.what.endswith((".", "?", "!")) else "."
    return f"{place}{finding.severity.value} {finding.code.value}: {finding.what}{end} {finding.remedy}"


def _count(number: int, word: str) -> str:
    return f"{number} {word}{'' if number == 1 else 's'}"
