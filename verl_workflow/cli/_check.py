"""`validate`, `plan` and `schema`: what can be known before anything runs. None of them writes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import typer

from verl_workflow.cli import _options
from verl_workflow.cli._output import ExitCode, note, print_json, print_line, print_table, reported
from verl_workflow.cli._words import with_values

if TYPE_CHECKING:
    from verl_workflow.pipeline import PlanReport


def validate(
    file: _options.PipelineFile,
    params: _options.Params = None,
    storage: _options.PipelineStorage = None,
    as_json: _options.Json = False,
) -> None:
    """Check a pipeline file: all mistakes at once, each with its place. Touches neither cluster nor storage."""
    with reported(as_json):
        from verl_workflow.pipeline import define, lint_stages
        from verl_workflow.spec import load

        document = load(file, _options.params_of(params))
        definition = define(document, storage=_options.pipeline_storage_of(storage))
        stages: list[dict[str, Any]] = [
            {
                "name": stage.name,
                "kind": stage.kind,
                "after": sorted(stage.needs()),
                "values": dict(member.values) if (member := getattr(stage, "member", None)) else {},
            }
            for stage in document.pipeline.stages
        ]
        warnings = lint_stages(document)
        if as_json:
            found = {
                "warnings": [finding.to_json() for finding in warnings],
                "name": document.pipeline.name,
                "params": dict(document.params),
                "stages": stages,
            }
            print_json({"valid": True, "file": str(document.path), **found, "storage": definition.storage})
            return
        print_line(f"{file} is valid: pipeline {document.pipeline.name}, {len(stages)} stages")
        for stage in stages:
            after = f" after {', '.join(stage['after'])}" if stage["after"] else ""
            print_line(f"  {stage['name']} ({stage['kind']}){with_values('', stage['values'])}{after}")
        for finding in warnings:
            note(f"warning: {finding.where}: {finding.what}. {finding.remedy}")


def plan(
    file: _options.PipelineFile,
    params: _options.Params = None,
    storage: _options.PipelineStorage = None,
    address: _options.Address = None,
    as_json: _options.Json = False,
) -> None:
    """Tell what a run would do: what runs, what is re-used and why, and what it needs of the cluster."""
    with reported(as_json):
        from verl_workflow.pipeline import plan as make_plan
        from verl_workflow.spec import load

        cluster = _options.cluster_of(address)
        report = make_plan(
            load(file, _options.params_of(params)),
            storage=_options.pipeline_storage_of(storage),
            address=cluster,
            connect_cluster=cluster is not None,
        )
        if as_json:
            print_json(report.to_json())
        else:
            _show(report)
        for problem in report.problems:
            note(f"error: {problem}")
        if report.problems:
            raise typer.Exit(ExitCode.USER_ERROR)


def schema(as_json: _options.Json = False) -> None:
    """Print the JSON Schema of pipeline files, for editors and other programs (always JSON)."""
    with reported(as_json):
        from verl_workflow.spec import json_schema

        print_json(json_schema())


def _show(report: PlanReport) -> None:
    from rich.table import Table

    table = Table("stage", "kind", "action", "needs", "why", box=None, pad_edge=False, header_style="bold")
    for row in report.rows:
        table.add_row(with_values(row.stage, row.values), row.kind, row.action, _amounts(row.needs), row.why)
    print_table(table)
    if report.cluster is not None:
        print_line(f"cluster: {_amounts(report.cluster)}")
    else:
        print_line(
            "cluster: none joined; a run starts Ray on this machine (--address HOST:PORT joins one), with as many"
        )
        print_line("         of the CPUs and GPUs above as it needs: they are Ray's slots, and no GPU has to be there")


def _amounts(resources: Any) -> str:
    return ", ".join(f"{amount:g} {name}" for name, amount in resources.items()) or "-"
