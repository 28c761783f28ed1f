from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from verl_workflow.spec import (
    DataStage,
    EvaluateStage,
    Model,
    Param,
    Pipeline,
    PromoteStage,
    PythonStage,
    ReasoningGym,
    Retry,
    Reward,
    Source,
    Storage,
    VerlStage,
    dump,
    json_schema,
    load,
)
from verl_workflow.spec._template import template_error

PIPELINES = Path(__file__).parents[2] / "pipelines"
STARTER = Path(__file__).parents[2] / "verl_workflow" / "cli" / "starter" / "pipeline.yaml"

# Shrinking a pipeline takes minutes.
PHASES = [Phase.explicit, Phase.reuse, Phase.generate]
CHECKS = [HealthCheck.function_scoped_fixture, HealthCheck.too_slow]

# Any text but what UTF-8 cannot hold, and what would be a reference.
texts = st.text(st.characters(codec="utf-8"), max_size=12).map(lambda text: text.replace("${", "$ {"))
awkward = st.sampled_from(
    [
        "",
        "no",
        "1e-6",
        "1",
        "0x1",
        ".nan",
        "~",
        "null",
        "true",
        "<<",
        "=",
        "- a",
        "a: b",
        "# c",
        " x",
        "x ",
        "a\nb",
        "\n",
        "a\n",
        "\na",
        "a\n\n b",
        "\tx\n",
        "é\u2028\n",
        "\x85",
        "\x00",
        "2026-01-01",
        "1:30",
        "'",
        '"',
        "%",
        "@",
        "`",
        "|",
        ">",
        "---",
        "---\na",
        "a\n---\nb",
        "a\r\nb",
        "*a",
        "&a",
        "!a",
        "{{ x }}",
        "\ufeff",
        "\ud7ff",
    ]
)
words = texts | awkward
numbers = st.floats(allow_nan=False, allow_infinity=False)
positive = st.floats(min_value=1e-12, max_value=1e12, exclude_min=True)
counts = st.integers(min_value=1, max_value=10**12)
names = st.from_regex(r"[A-Za-z_][A-Za-z0-9_-]{0,8}", fullmatch=True).filter(
    lambda name: name not in {"model", "params"}
)
values = st.recursive(
    st.none() | st.booleans() | st.integers() | numbers | words,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(words, inner, max_size=3),
    max_leaves=6,
)
objects = st.dictionaries(words, values, max_size=3)
rewards = st.builds(Reward, function=st.just("reward.py:score"), kwargs=objects)
retries = st.builds(Retry, attempts=counts, backoff=st.floats(min_value=0, max_value=1e6))
gym = st.builds(
    ReasoningGym, dataset=st.sampled_from(["chain_sum", "arc_1d"]), size=counts, seed=st.integers(), config=objects
)
sources = st.builds(Source, reasoning_gym=gym) | st.sampled_from(
    [Source(parquet="s3://bucket/x.parquet"), Source(jsonl=["s3://a/b.jsonl", "s3://a/c: d.jsonl"])]
)


def _stages(chosen: list[str]) -> st.SearchStrategy[list[Any]]:
    """A chain: each stage may come after the one before it."""
    stages = []
    for index, name in enumerate(chosen):
        common = {
            "name": st.just(name),
            "after": st.sampled_from([[], chosen[max(0, index - 1) : index]]),
            "timeout": st.none() | positive,
            "retry": retries,
        }
        stages.append(
            st.builds(
                DataStage,
                **common,
                source=sources,
                validation=counts | sources,
                prompt=st.none() | words.filter(lambda text: template_error(text) is None),
                answer=st.none() | words,
                system=st.none() | words,
                reward=st.none() | rewards,
                max_rejected=st.floats(min_value=0, max_value=1),
            )
            | st.builds(
                VerlStage,
                **common,
                model=st.just("${model}"),
                train=st.just("s3://b/t"),
                validation=st.just("s3://b/v"),
                reward=rewards,
                steps=counts,
                batch_size=counts,
                rollouts=st.integers(min_value=2, max_value=9),
                learning_rate=positive,
                save_every=counts,
                device=st.sampled_from(["auto", "cpu", "cuda"]),
                seed=st.integers(),
                overrides=objects,
            )
            | st.builds(EvaluateStage, **common, model=st.just("s3://b/m"), data=st.just("s3://b/v"), reward=rewards)
            | st.builds(
                PythonStage,
                **common,
                function=st.just("reward.py:score"),
                args=objects,
                cpus=st.sampled_from([0, 0.5, 1, 2]),
            )
        )
    return st.tuples(*stages).map(list)


pipelines = st.lists(names, min_size=1, max_size=3, unique=True).flatmap(
    lambda chosen: st.builds(
        Pipeline,
        name=names,
        description=words,
        storage=st.builds(Storage, uri=words, artifacts=st.none() | words),
        model=st.just(Model(builtin="tiny")),
        params=st.dictionaries(names, st.builds(Param, type=st.just("string"), default=words.filter(bool)), max_size=2),
        stages=_stages(chosen),
    )
)


@settings(max_examples=60, deadline=None, phases=PHASES, suppress_health_check=CHECKS)
@given(pipeline=pipelines)
def test_a_pipeline_survives_yaml(folder: Path, pipeline: Pipeline) -> None:
    text = dump(pipeline)
    (folder / "p.yaml").write_text(text, encoding="utf-8", newline="")
    loaded = load("p.yaml").pipeline
    assert loaded == pipeline
    assert dump(loaded) == text


def test_what_is_loaded_survives_yaml(good: Path) -> None:
    pipeline = load(good, {"steps": "9"}).pipeline
    good.write_text(dump(pipeline))
    assert load(good).pipeline == pipeline


def test_defaults_are_left_out_and_the_text_is_pleasant(folder: Path) -> None:
    pipeline = Pipeline(
        name="p",
        params={"steps": Param(type="integer", default=3)},
        stages=[
            DataStage(
                name="prepare", source=Source(jsonl="rows.jsonl"), validation=2, prompt="Add.\n\n{{ question }}\n"
            ),
            VerlStage(
                name="train",
                model="${model}",
                train="${prepare.train}",
                validation="${prepare.validation}",
                reward=Reward(function="reward.py:score"),
                steps=5,
                batch_size=2,
                learning_rate=1e-6,
                retry=Retry(attempts=1),
                overrides={"a.b": "1e-6", "c": 1e-6},
            ),
            PromoteStage(name="promote", registry="r", evaluation="${evaluate}"),
        ],
    )
    assert dump(pipeline) == (
        "version: 1\nname: p\nparams:\n  steps:\n    type: integer\n    default: 3\nstages:\n"
        "  prepare:\n    kind: data\n    source:\n      jsonl: rows.jsonl\n    validation: 2\n"
        "    prompt: |\n      Add.\n\n      {{ question }}\n"
        "  train:\n    kind: verl\n    retry:\n      attempts: 1\n    train: ${prepare.train}\n"
        "    validation: ${prepare.validation}\n    reward:\n      function: reward.py:score\n    steps: 5\n"
        "    batch_size: 2\n    overrides:\n      a.b: '1e-6'\n      c: 1.0e-06\n"
        "  promote:\n    kind: promote\n    registry: r\n    evaluation: ${evaluate}\n"
    )


def validator() -> jsonschema.Draft202012Validator:
    schema = json.loads(json.dumps(json_schema()))
    jsonschema.Draft202012Validator.check_schema(schema)
    return jsonschema.Draft202012Validator(schema)


@pytest.mark.parametrize("path", [*sorted(PIPELINES.glob("*.yaml")), STARTER], ids=lambda path: path.stem)
def test_the_example_pipelines_fit_the_json_schema(path: Path) -> None:
    validator().validate(yaml.safe_load(path.read_text()))


@settings(max_examples=10, deadline=None, phases=PHASES, suppress_health_check=CHECKS)
@given(pipeline=pipelines)
def test_all_pipelines_fit_the_json_schema(pipeline: Pipeline) -> None:
    from verl_workflow.spec._dump import plain

    validator().validate(plain(pipeline))
    validator().validate(plain(pipeline, stages_as_list=True))


def test_patterns_are_those_of_json_schema_and_not_of_python() -> None:
    assert r"\\Z" not in json.dumps(json_schema())


@pytest.mark.parametrize(
    "change",
    [
        {"version": 2},
        {"name": "9"},
        {"nme": "x"},
        {"stages": {}},
        {"stages": {"a b": {"kind": "python", "function": "f.py:f"}}},
        {"stages": {"a": {"kind": "pyton", "function": "f.py:f"}}},
        {"stages": {"a": {"function": "f.py:f"}}},
        {"stages": {"a": {"kind": "python", "function": "f.py"}}},
        {"stages": {"a": {"kind": "python", "function": "f.py:f", "cpus": "two"}}},
        {"stages": {"a": {"kind": "python", "function": "f.py:f", "steps": 2}}},
        {"stages": {"a": {"kind": "python", "function": "f.py:f", "name": "a"}}},
        {"stages": [{"kind": "python", "function": "f.py:f"}]},
        {"stages": {"a": {"kind": "data", "source": {"jsonl": 3}, "validation": 1}}},
        {"params": {"a": {"type": "integr"}}},
    ],
)
def test_the_json_schema_refuses_what_load_refuses(change: dict[str, Any]) -> None:
    right = {
        "version": 1,
        "name": "p",
        "stages": {"a": {"kind": "python", "function": "f.py:f", "cpus": "${params.n}"}},
    }
    validator().validate(right)
    assert list(validator().iter_errors({**right, **change}))
