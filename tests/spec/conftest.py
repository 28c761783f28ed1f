from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from verl_workflow.errors import UserError, UserErrors
from verl_workflow.spec import load

REWARD = 'def score(data_source="", solution_str="", ground_truth="", extra_info=None, **more):\n    return 1.0\n'


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory: a folder with a reward, which takes anything, and some rows."""
    (tmp_path / "reward.py").write_text(REWARD)
    (tmp_path / "rows.jsonl").write_text('{"question": "1 + 1", "answer": "2"}\n')
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def mistakes(folder: Path) -> Callable[..., list[str]]:
    """Loads a YAML text that has mistakes, as p.yaml: all messages, in order."""

    def found(text: str, **params: object) -> list[str]:
        (folder / "p.yaml").write_text(text)
        with pytest.raises(UserError) as caught:
            load("p.yaml", params)
        errors = caught.value.errors if isinstance(caught.value, UserErrors) else [caught.value]
        return [str(error) for error in errors]

    return found


GOOD = """\
version: 1
name: sums
description: All kinds of stages.
params:
  steps: {type: integer, default: 4, minimum: 1}
  name: {type: string, default: sums}
storage: {uri: ./store}
model: {builtin: tiny}
stages:
  prepare:
    kind: data
    source: {jsonl: rows.jsonl}
    validation: 1
    prompt: "{{ question }} = ?"
    answer: answer
    reward: {function: "reward.py:score"}
  train:
    kind: verl
    train: ${prepare.train}
    validation: ${prepare.validation}
    reward: {function: "reward.py:score", kwargs: {weight: 0.5}}
    steps: ${params.steps}
    batch_size: 2
    learning_rate: 1e-4
    save_every: 2
    overrides: {actor_rollout_ref.actor.clip_ratio: 0.3}
  evaluate:
    kind: evaluate
    model: ${train.model}
    champion: ${params.name}
    data: ${prepare.validation}
    reward: {function: "reward.py:score"}
  promote:
    kind: promote
    registry: ${params.name}
    evaluation: ${evaluate}
    gate: candidate.score >= 0.3 and (champion is None or candidate.score > champion.score)
  tell:
    kind: python
    function: reward.py:score
    args: {text: "did ${params.steps} steps as ${params.name}", rows: "${prepare.rows.train}"}
    after: [promote]
"""


@pytest.fixture
def good(folder: Path) -> Path:
    """A right pipeline file with a stage of each kind."""
    (folder / "p.yaml").write_text(GOOD)
    return folder / "p.yaml"
