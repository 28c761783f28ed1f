# ruff: noqa: E501  (messages stand whole, as they are read)
from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from verl_workflow.errors import ErrorCode, UserError, UserErrors
from verl_workflow.spec import DataStage, PythonStage, Source, load, resolve

Mistakes = Callable[..., list[str]]

HEAD = "version: 1\nname: p\nmodel: {builtin: tiny}\nstages:\n"
REWARD = 'reward: {function: "reward.py:score"}'


def data(name: str, rest: str = "") -> str:
    return f"  {name}: {{kind: data, source: {{jsonl: rows.jsonl}}, validation: 1{rest}}}\n"


def python(name: str, rest: str = "") -> str:
    return f'  {name}: {{kind: python, function: "reward.py:score"{rest}}}\n'


def verl(name: str, rest: str) -> str:
    return (
        f"  {name}:\n    kind: verl\n    train: rows.jsonl\n    validation: rows.jsonl\n    {REWARD}\n"
        f"    steps: 2\n    batch_size: 1\n{rest}"
    )


def test_a_right_file_loads(good: Path) -> None:
    document = load(good, {"steps": "7", "name": "other"})
    assert document.params == {"steps": 7, "name": "other"}
    assert document.path == good
    pipeline = document.pipeline
    assert [stage.name for stage in pipeline.stages] == ["prepare", "train", "evaluate", "promote", "tell"]
    assert pipeline.stage("train").steps == 7
    assert pipeline.stage("train").learning_rate == 1e-4
    assert pipeline.stage("promote").registry == "other"
    assert pipeline.stage("tell").args["text"] == "did 7 steps as other"
    assert pipeline.stage("tell").needs() == {"prepare", "promote"}
    assert pipeline.stage("train").needs() == {"prepare"}


def test_places_are_those_of_the_keys(good: Path) -> None:
    document = load(good)
    assert document.where(("stages", "train", "steps")) == f"{good}:22:5"
    assert (
        document.where(("stages", "train", "overrides", "actor_rollout_ref", "actor", "clip_ratio")) == f"{good}:26:17"
    )
    assert document.where(("stages", "train", "rollouts")) == f"{good}:17:3"
    assert document.where(("storage", "uri")) == f"{good}:7:11"
    assert document.where(("artifacts",)) == f"{good}:1:1"


def test_stages_may_be_a_list(folder: Path) -> None:
    (folder / "p.yaml").write_text(
        "version: 1\nname: p\nstages:\n  - name: a\n    kind: python\n    function: reward.py:score\n"
        "  - name: b\n    kind: python\n    function: reward.py:score\n    after: [a]\n"
    )
    document = load("p.yaml")
    assert [stage.name for stage in document.pipeline.stages] == ["a", "b"]
    assert document.where(("stages", "b", "function")) == "p.yaml:9:5"
    assert document.where(("stages", "b", "cpus")) == "p.yaml:7:5"


def test_data_paths_start_at_the_file_and_storage_at_the_working_directory(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sub = folder / "sub"
    sub.mkdir()
    (sub / "r.py").write_text("def f(**given): pass\n")
    (sub / "p.yaml").write_text(
        "version: 1\nname: p\nstorage: {uri: store}\nmodel: {path: .}\nstages:\n"
        '  d: {kind: data, source: {jsonl: ["../rows.jsonl", "../*.jsonl"]}, validation: {jsonl: ../rows.jsonl}}\n'
        '  s: {kind: data, source: {parquet: "s3://bucket/x.parquet"}, validation: 3}\n'
        "  e: {kind: evaluate, model: '${model}', data: ../rows.jsonl, reward: {function: 'r.py:f'}}\n"
    )
    pipeline = load("sub/p.yaml").pipeline
    stage = pipeline.stage("d")
    assert isinstance(stage, DataStage)
    assert stage.source.jsonl == [f"{folder}/rows.jsonl", f"{folder}/*.jsonl"]
    assert stage.validation == Source(jsonl=f"{folder}/rows.jsonl")
    assert pipeline.stage("s").source.parquet == "s3://bucket/x.parquet"
    assert pipeline.stage("e").data == f"{folder}/rows.jsonl"
    assert pipeline.stage("e").model == "${model}"
    assert pipeline.model is not None and pipeline.model.path == str(sub)
    assert pipeline.storage.uri == "store"


def test_a_whole_reference_to_a_param_keeps_its_type_and_an_embedded_one_is_text(folder: Path) -> None:
    (folder / "p.yaml").write_text(
        "version: 1\nname: p\nparams:\n  n: {type: integer, default: 3}\n  x: {type: number, default: 0.5}\n"
        "  b: {type: boolean, default: false}\n  s: {type: string, default: '7'}\nstages:\n"
        + python(
            "a",
            ', args: {n: "${params.n}", x: ["${params.x}"], b: "${params.b}", s: "${params.s}", '
            't: "${params.n} ${params.x} ${params.b} ${params.s}"}',
        )
    )
    stage = load("p.yaml", {"x": "2e-3", "b": "TRUE"}).pipeline.stage("a")
    assert isinstance(stage, PythonStage)
    assert stage.args == {"n": 3, "x": [0.002], "b": True, "s": "7", "t": "3 0.002 true 7"}


PARAMS = (
    "version: 1\nname: p\nparams:\n  n: {type: integer, default: 3, minimum: 1, maximum: 9}\n"
    "  kind: {type: string, enum: [small, large], default: small}\n  tag: {type: string, pattern: '^v[0-9]+$', default: v1}\n"
    "  rate: {type: number, default: 1}\n  flag: {type: boolean, default: true}\nstages:\n"
)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"n": "ten"}, "-p n: params.n should be a whole number (got 'ten'). Write it like -p n=3."),
        ({"n": "2.5"}, "-p n: params.n should be a whole number (got '2.5'). Write it like -p n=3."),
        ({"n": 2.5}, "-p n: params.n should be a whole number (got 2.5). Write it like -p n=3."),
        ({"n": True}, "-p n: params.n should be a whole number (got True). Write it like -p n=3."),
        ({"n": "0"}, "-p n: params.n should be at least 1 (got 0)"),
        ({"n": "10"}, "-p n: params.n should be at most 9 (got 10)"),
        ({"kind": "smal"}, "-p kind: params.kind should be one of small, large (got 'smal'). Did you mean 'small'?"),
        ({"tag": "1"}, "-p tag: params.tag should match ^v[0-9]+$ (got '1')"),
        ({"rate": "fast"}, "-p rate: params.rate should be a number (got 'fast'). Write it like -p rate=0.5."),
        ({"rate": "nan"}, "-p rate: params.rate should be a number (got 'nan'). Write it like -p rate=0.5."),
        ({"rate": float("inf")}, "-p rate: params.rate should be a finite number (got inf)"),
        ({"flag": "yes"}, "-p flag: params.flag should be true or false (got 'yes'). Write it like -p flag=true."),
        ({"nn": "1"}, "-p: there is no such param (got 'nn'). Declared params: n, kind, tag, rate, flag."),
        (
            {"flg": "1"},
            "-p: there is no such param (got 'flg'). Did you mean 'flag'? Declared params: n, kind, tag, rate, flag.",
        ),
    ],
)
def test_a_wrong_param_is_told(mistakes: Mistakes, given: dict[str, Any], message: str) -> None:
    assert mistakes(PARAMS + python("a"), **given) == [message]


def test_wrong_declarations_of_params_are_told(mistakes: Mistakes) -> None:
    assert mistakes(
        "version: 1\nname: p\nparams:\n  a: {type: integer, default: x}\n  b: {type: integr}\n  c: {type: string}\n"
        "  d: {type: string, default: x, pattern: '('}\n  e f: {type: string}\n  g: 3\n"
        "  h: {type: integer, default: 1, minimun: 2}\nstages:\n"
        + python("s", ', args: {a: "${params.a}", z: "${params.cc}", e: "${params.x y}"}, cpus: "${params.b}"')
    ) == [
        "p.yaml:4:31: the default of params.a should be a whole number (got 'x'). Write it like -p a=3.",
        "p.yaml:5:13: params.b.type should be string, integer, number or boolean (got 'integr'). Did you mean 'integer'?",
        "p.yaml:6:3: params.c has no default and was not given. Give it: -p c=<string>.",
        "p.yaml:7:3: params.d: its pattern is no regular expression: missing ), unterminated subpattern at position 0",
        "p.yaml:8:3: a param's name has letters, digits, _ and - (got 'e f')",
        "p.yaml:9:6: params.g should be a mapping (got 3)",
        "p.yaml:10:34: unknown key in params.h (got 'minimun'). Did you mean 'minimum'? "
        "Known: default, description, enum, maximum, minimum, pattern, type.",
        "p.yaml:12:78: there is no such param (got '${params.cc}'). Declared params: a, b, c, d, e f, g, h.",
        "p.yaml:12:97: there is no such param (got '${params.x y}'). Declared params: a, b, c, d, e f, g, h.",
    ]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            HEAD + "  a: {kind: §dta}\n",
            "stages.a: unknown kind of stage (got 'dta'). Did you mean 'data'? "
            "Kinds: data, verl, evaluate, promote, python, choose.",
        ),
        (HEAD + "  a: {kind: §[x]}\n", "stages.a: unknown kind of stage (got ['x']). "
         "Kinds: data, verl, evaluate, promote, python, choose."),
        (HEAD + "  §a: {knd: data}\n", "stages.a has no 'kind'. Did you mean 'kind' by 'knd'? "
         "Add `kind:`, one of data, verl, evaluate, promote, python, choose."),
        (HEAD + "  a: §3\n", "stages.a should be a mapping (got 3). Give it a `kind`."),
        (HEAD + "  a:§\n", "stages.a should be a mapping (got 'null'). Give it a `kind`."),
        (HEAD + python("a", ", §name: b"), "stages.a has a name of its own (got 'b'). "
         "Drop `name`: the key in front of the stage is its name."),
        (HEAD + python("§a b"), "stages.a b.name should be a name: letters, digits, _ and -, "
         "first a letter or _, 64 characters at most (got 'a b')"),
        (HEAD + python("a", ", §argz: {}"), "unknown key in stages.a (got 'argz'). Did you mean 'args'?"),
        (HEAD + python("a", ", retry: {attempts: §0}"), "stages.a.retry.attempts should be greater than 0 (got 0)"),
        (HEAD + python("a", ", retry: {attempts: §'2'}"), "stages.a.retry.attempts should be a whole number (got '2')"),
        (HEAD + python("a", ", retry: {attempts: §true}"), "stages.a.retry.attempts should be a whole number (got True)"),
        (HEAD + python("a", ", retry: §3"), "stages.a.retry should be a mapping (got 3)"),
        (HEAD + python("a", ", timeout: §.inf"), "stages.a.timeout should be a finite number (got inf)"),
        (HEAD + python("a", ", §args: {x: .nan}"), "stages.a.args: holds what JSON cannot: "
         "Out of range float values are not JSON compliant"),
        (HEAD + data("a", ", max_rejected: §2"), "stages.a.max_rejected should be at most 1 (got 2)"),
        (HEAD + data("a").replace("1}", "§few}"), "stages.a.validation should be a whole number (got 'few')"),
        (HEAD + data("a").replace("1}", "§[1]}"), "stages.a.validation should be a whole number (got [1])"),
        (HEAD + data("a").replace("1}", "{§jsonk: x}}"), "unknown key in stages.a.validation (got 'jsonk'). "
         "Did you mean 'jsonl'? Known: jsonl, parquet, reasoning_gym."),
        (HEAD + data("a").replace("rows.jsonl", "§{a: 1}"), "stages.a.source.jsonl should be text (got {'a': 1})"),
        (HEAD + data("a").replace("rows.jsonl", "§[]"), "stages.a.source.jsonl is empty (got []). "
         "Give it a value, or drop the key."),
        (HEAD + data("a").replace("jsonl: rows.jsonl", "§reasoning_gym: {dataset: chain_sum}"),
         "stages.a.source.reasoning_gym has no 'size'. Add `size:`."),
        (HEAD + data("a").replace("source: {jsonl: rows.jsonl}", "§source: {}"),
         "stages.a.source: give exactly one of parquet, jsonl and reasoning_gym"),
        (HEAD + verl("t", "    save_every: 1\n    algorithm: §GPRO\n"),
         "stages.t.algorithm should be grpo or ppo (got 'GPRO'). Did you mean 'grpo'?"),
        (HEAD + verl("§t", "    save_every: 1\n    rollouts: 1\n"),
         "stages.t: grpo compares answers to one prompt: rollouts must be 2 or more"),
        (HEAD + verl("§t", ""), "stages.t: retry.attempts is 3 but nothing is saved to resume from: "
         "set save_every to 1 or more, or retry.attempts to 1"),
        (HEAD + verl("t", "    save_every: §0\n"), "stages.t.save_every should be greater than 0 (got 0)"),
        (HEAD + verl("t", "    save_every: 1\n    §train: x\n"),
         "the key 'train' is there twice, first in line 7 (got 'train'). Keep one of them."),
        ("§name: p\nstages:\n" + python("a"), "the pipeline has no 'version'. Add `version: 1`."),
        ("version: §2\nname: p\nstages:\n" + python("a"), "version should be 1 (got 2)"),
        ("§version: true\nname: p\nstages:\n" + python("a"),
         "version: should be 1, the one version of the format there is (got True)"),
        ("§version: 1\nstages:\n" + python("a"), "the pipeline has no 'name'. Add `name:`."),
        ("§version: 1\nname: p\n", "the pipeline has no 'stages'. Add `stages:`."),
        ("version: 1\nname: p\nstages: §{}\n", "the pipeline has no stage. Add one under `stages`."),
        ("version: 1\nname: p\nstages:§\n", "stages should be a mapping of names to stages (got 'null'). "
         "Write `stages: {name: {kind: ...}}`."),
        ("version: 1\nname: p\nstorage: {§url: x}\nstages:\n" + python("a"),
         "unknown key in storage (got 'url'). Known: artifacts, uri."),
        ("version: 1\nname: p\n§model: {}\nstages:\n" + python("a"),
         "model: give exactly one of builtin, path and gguf"),
        ("version: 1\nname: p\nparams: §[a]\nstages:\n" + python("a"),
         "params should be a mapping of names to declarations (got ['a']). "
         "Write `params: {steps: {type: integer}}`."),
    ],
)  # fmt: skip
def test_one_mistake_gives_one_message_with_place_value_and_remedy(mistakes: Mistakes, text: str, message: str) -> None:
    """The place is the one marked by §."""
    before, _, after = text.partition("§")
    line, column = before.count("\n") + 1, len(before) - before.rfind("\n")
    assert mistakes(before + after) == [f"p.yaml:{line}:{column}: {message}"]


def test_all_mistakes_are_told_at_once_in_the_order_of_the_file(mistakes: Mistakes) -> None:
    found = mistakes(
        "version: 1\nname: 9p\nmodel: {path: nowhere}\ncode: [nothing.py]\nstages:\n"
        + data("a", ", max_rejected: 2").replace("rows", "row")
        + python("b", ', args: {x: "${a.trian}", y: "${c.z}"}, cpus: -1')
        + "  d: {kind: promot}\n",
        unknown="1",
    )
    places = [re.match(r"p\.yaml:\d+", message) for message in found]
    assert [place.group() if place else message[:3] for place, message in zip(places, found, strict=True)] == [
        "-p:", "p.yaml:2", "p.yaml:3", "p.yaml:4", "p.yaml:6", "p.yaml:6", "p.yaml:7", "p.yaml:7", "p.yaml:7", "p.yaml:8",
    ]  # fmt: skip
    assert not any("pydantic" in message.lower() or "http" in message for message in found)


def test_mistakes_in_a_list_of_stages_have_their_place(mistakes: Mistakes) -> None:
    assert mistakes(
        "version: 1\nname: p\nstages:\n  - kind: python\n    function: reward.py:score\n"
        "  - {name: a, kind: python, function: 'reward.py:score', cpu: 1}\n"
        "  - {name: a, kind: python, function: 'reward.py:score'}\n  - x\n"
    ) == [
        "p.yaml:4:5: stages[0] has no 'name'. Add `name:`.",
        "p.yaml:6:58: unknown key in stages.a (got 'cpu'). Did you mean 'cpus'?",
        "p.yaml:7:6: stages.a.name: two stages have the same name (got 'a'). Rename one of them.",
        "p.yaml:8:5: stages[3] should be a mapping (got 'x'). Give it a `kind`.",
    ]


def test_errors_say_what_kind_they_are(folder: Path) -> None:
    (folder / "p.yaml").write_text(PARAMS + python("a"))
    with pytest.raises(UserErrors) as caught:
        load("p.yaml", {"n": "0"})
    assert caught.value.code is ErrorCode.PARAM_INVALID
    (folder / "p.yaml").write_text(HEAD + data("a").replace("rows", "row"))
    with pytest.raises(UserErrors) as caught:
        load("p.yaml")
    assert caught.value.code is ErrorCode.FILE_MISSING


def test_a_missing_file_is_told(folder: Path) -> None:
    with pytest.raises(UserError, match=r"^nothing\.yaml: the pipeline file does not exist"):
        load("nothing.yaml")


def test_a_working_directory_that_is_gone_is_told(good: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    gone = tmp_path_factory.mktemp("gone")
    os.chdir(gone)
    gone.rmdir()
    assert load(good).path == good
    for call in (lambda: load("p.yaml"), lambda: load("p.py"), lambda: resolve(load(good).pipeline)):
        with pytest.raises(UserError, match="the working directory does not exist any more"):
            call()


def test_a_param_that_is_no_text_is_told(mistakes: Mistakes) -> None:
    text = "version: 1\nname: p\nparams: {p: {type: string}}\nstages: {a: {kind: python, function: 'json:dumps'}}\n"
    assert mistakes(text, p=os.fsdecode(b"\xff")) == [
        "-p p: params.p is no UTF-8 text (got '\\udcff'). Write it in UTF-8."
    ]


def test_a_pattern_cannot_take_forever(mistakes: Mistakes) -> None:
    head = "version: 1\nname: p\nstages: {a: {kind: python, function: 'json:dumps'}}\nparams:\n"
    text = f"{'a' * 40}!"
    assert mistakes(head + f"  p: {{type: string, default: {text}, pattern: '(a+)+$'}}\n") == [
        f"p.yaml:5:30: the default of params.p should match (a+)+$ (got '{text}')"
    ]
    [found] = mistakes(head + "  p: {type: string, default: aa, pattern: '(a)\\1'}\n")
    assert found.startswith("p.yaml:5:3: params.p: its pattern takes a matcher that may never end: look-around")


@pytest.mark.parametrize(
    ("amount", "message"),
    [
        ("cpus: 0.00001", "stages.a.cpus: Ray hands out no less than 0.0001: give 0, or 0.0001 or more (got 1e-05)"),
        ("gpus: 0.00001", "stages.a.gpus: Ray hands out no less than 0.0001: give 0, or 0.0001 or more (got 1e-05)"),
        ("gpus: 1.5", "stages.a.gpus: Ray hands out shares of one GPU, or whole ones: give 1 or less, or a whole number "
         "(got 1.5)"),
    ],
)  # fmt: skip
def test_an_amount_that_ray_does_not_hand_out_is_told(mistakes: Mistakes, amount: str, message: str) -> None:
    stages = f"stages:\n  a:\n    kind: python\n    function: json:dumps\n    {amount}\n"
    assert mistakes("version: 1\nname: p\n" + stages) == [f"p.yaml:7:5: {message}"]


def test_amounts_that_ray_hands_out_are_right(folder: Path) -> None:
    for amount in ("cpus: 0.0001", "cpus: 1.5", "gpus: 0.5", "gpus: 2", "gpus: 0"):
        stages = f"stages:\n  a: {{kind: python, function: 'json:dumps', {amount}}}\n"
        (folder / "p.yaml").write_text("version: 1\nname: p\n" + stages)
        load("p.yaml")


def test_loading_writes_nothing(good: Path) -> None:
    before = sorted(good.parent.rglob("*"))
    load(good)
    assert sorted(good.parent.rglob("*")) == before
