from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml
from pydantic import ValidationError

from verl_workflow.spec import Placement, Pool, dump, json_schema, load

STAGE = """\
version: 1
name: placed
params:
  zone: {type: string, default: a}
model: {builtin: tiny}
stages:
  train:
    kind: verl
    train: rows.jsonl
    validation: rows.jsonl
    reward: {function: "reward.py:score"}
    steps: 2
    batch_size: 1
    retry: {attempts: 1}
    rollout: vllm
    gpus_per_node: 8
    placement:
"""
PLACEMENT = """\
      turn: 7200.0
      accelerator: H200
      labels: {zone: "${params.zone}", market: "!spot", rack: "in(r1, r2)"}
      rollout: {nodes: 2, gpus_per_node: 8, accelerator: L40S, labels: {}}
      reward: {gpus_per_node: 2}
"""


def placement_of(folder: Path, text: str, **params: Any) -> Placement:
    (folder / "p.yaml").write_text(STAGE + text)
    found = load("p.yaml", params).pipeline.stage("train").placement
    assert isinstance(found, Placement)
    return found


def test_pools_accelerators_and_labels_are_written_as_they_are_meant(folder: Path) -> None:
    found = placement_of(folder, PLACEMENT, zone="b")
    assert found == Placement(
        turn=7200.0,
        accelerator="H200",
        labels={"zone": "b", "market": "!spot", "rack": "in(r1, r2)"},
        rollout=Pool(nodes=2, gpus_per_node=8, accelerator="L40S", labels={}),
        reward=Pool(gpus_per_node=2),
    )


def test_a_placement_survives_being_dumped_and_fits_the_schema(folder: Path) -> None:
    (folder / "p.yaml").write_text(STAGE + PLACEMENT)
    document = load("p.yaml", {})
    text = dump(document.pipeline)
    jsonschema.validate(yaml.safe_load(text), json_schema())
    (folder / "again.yaml").write_text(text)
    assert load("again.yaml", {}).pipeline == document.pipeline


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("      reference: {gpus_per_node: 1}\n", "actor, critic and reference on the same GPUs"),
        ("      critic: {gpus_per_node: 1}\n", "the critic can have none of its own"),
        ("      trainer: {gpus_per_node: 1}\n", "the stage's own nodes and gpus_per_node"),
        ("      labels: {zone: 'in(a'}\n", "one of Ray's forms"),
        ("      labels: {zone: '!!a'}\n", "one of Ray's forms"),
        ("      rollout: {nodes: 1}\n", "gpus_per_node"),
        ("      room: 0\n", "greater than 0"),
    ],
)
def test_what_verl_cannot_place_is_refused_with_the_reason(
    mistakes: Callable[..., list[str]], text: str, said: str
) -> None:
    [mistake] = mistakes(STAGE + text)
    assert said in mistake
    assert mistake.startswith("p.yaml:")


def test_python_refuses_the_same() -> None:
    with pytest.raises(ValidationError, match="the reference can have none of its own"):
        Placement(**{"reference": {"gpus_per_node": 1}})
