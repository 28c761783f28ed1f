"""Pipelines to plain data and YAML."""

from __future__ import annotations

from typing import Any

import yaml

from verl_workflow.spec._model import Pipeline
from verl_workflow.spec._yaml import CoreDumper


def dump(pipeline: Pipeline) -> str:
    """The pipeline as YAML, defaults left out: `load` of it yields an equal pipeline.

    Paths are written as they are: relative ones mean the folder into which the text is put.
    """
    text = yaml.dump(
        plain(pipeline), Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=100, default_flow_style=False
    )
    return str(text)


def plain(pipeline: Pipeline, *, stages_as_list: bool = False) -> dict[str, Any]:
    """What a YAML file holds: only what differs from the defaults, stages by name.

    Args:
        stages_as_list: keep stages in a list, each with its name (two of one name, a mistake, stay two).
    """
    data: dict[str, Any] = {"version": pipeline.version}
    data.update(pipeline.model_dump(mode="json", exclude_defaults=True, exclude={"version", "stages"}, warnings=False))
    stages = []
    for stage in pipeline.stages:
        body = stage.model_dump(mode="json", exclude_defaults=True, exclude={"name", "kind"}, warnings=False)
        stages.append((stage.name, {"kind": stage.kind, **body}))
    names = [name for name, _ in stages]
    if stages_as_list or len(set(names)) < len(names):
        data["stages"] = [{"name": name, **body} for name, body in stages]
    else:
        data["stages"] = dict(stages)
    return data


class _Dumper(CoreDumper):
    """Texts of several lines as blocks, where YAML can hold them so without loss."""

    def represent_str(self, data: str) -> yaml.ScalarNode:
        lines = data.split("\n")
        if not all(line.isprintable() for line in lines):
            # Only double quotes have escapes: YAML counts more than \n among line breaks, and folds them.
            style = '"'
        elif len(lines) > 1 and lines[0] == lines[0].lstrip() != "" and all(line == line.rstrip() for line in lines):
            style = "|"
        else:
            style = None
        return self.represent_scalar("tag:yaml.org,2002:str", data, style=style)


_Dumper.add_representer(str, _Dumper.represent_str)
