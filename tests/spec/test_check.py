# ruff: noqa: E501  (messages stand whole, as they are read)
from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from verl_workflow.errors import ErrorCode
from verl_workflow.gates import GATE_NAMES
from verl_workflow.spec import (
    DataStage,
    EvaluateStage,
    Model,
    Pipeline,
    PromoteStage,
    PythonStage,
    Reward,
    Source,
    VerlStage,
    check,
    load,
)
from verl_workflow.spec._gym import unknown_dataset

Mistakes = Callable[..., list[str]]

HEAD = "version: 1\nname: p\nstages:\n"
DATA = "  d: {kind: data, source: {jsonl: rows.jsonl}, validation: 1}\n"
REWARD = "reward: {function: 'reward.py:score'}"


def python(name: str, rest: str = "", function: str = "reward.py:score") -> str:
    return f'  {name}: {{kind: python, function: "{function}"{rest}}}\n'


def evaluate(name: str, model: str, data: str = "rows.jsonl", rest: str = "") -> str:
    return f'  {name}: {{kind: evaluate, model: "{model}", data: "{data}", {REWARD}{rest}}}\n'


@pytest.mark.parametrize(
    ("stages", "message"),
    [
        (DATA + python("a", ', args: {x: §"${e.train}"}'),
         "stages.a.args.x: there is no stage 'e' (got '${e.train}'). Stages: d."),
        (DATA + python("prepare") + python("a", ', args: {x: [1, §"${prepaer}"]}'),
         "stages.a.args.x[1]: there is no stage 'prepaer' (got '${prepaer}'). Did you mean 'prepare'? Stages: d, prepare."),
        (DATA + python("a", ', args: {x: §"${d.trian}"}'),
         "stages.a.args.x: the stage d has no output 'trian' (got '${d.trian}'). Did you mean 'train'? "
         "A stage of kind data has: rejected, rows, train, validation."),
        (DATA + python("a", ', args: {x: §"at ${d.train}"}'),
         "stages.a.args.x: a reference has to be the whole value (got 'at ${d.train}'). Write it like ${stage.output}."),
        (DATA + python("a", ', args: {x: §"${d.train"}'),
         "stages.a.args.x: this is no reference (got '${d.train'). Write it like ${stage.output}."),
        (python("a", ', args: {x: §"${a.y}"}'),
         "stages.a.args.x: the stage refers to itself (got '${a.y}'). Refer to a stage before it."),
        (python("a", ", after: [§a]"), "stages.a.after[0]: the stage comes after itself (got 'a'). Drop it."),
        (python("first") + python("a", ", after: [first, §frist]"),
         "stages.a.after[1]: there is no stage 'frist' (got 'frist'). Did you mean 'first'? Stages: first."),
        (python("a", ', args: {x: §"${b.y}"}') + python("b", ', args: {x: "${c.y}"}') + python("c", ", after: [a]"),
         "the stages wait for each other: a -> b -> c -> a. Drop one of these references."),
        (python("z", ", after: [b]") + python("a", ", after: [§b]") + python("b", ", after: [a]"),
         "the stages wait for each other: a -> b -> a. Drop one of these references."),
        (python("§model"), "a stage cannot be called model, for ${model} means the pipeline's "
         "(got 'model'). Choose another name."),
        (evaluate("e", "§${model}"), None),
        (DATA + evaluate("e", ".", '", data: §"${d}').replace('data: "", ', ""),
         "stages.e.data: the reference names no output (got '${d}'). "
         "Files of d: ${d.rejected}, ${d.train}, ${d.validation}."),
        (DATA + evaluate("e", ".", '", data: §"${d.rows}').replace('data: "", ', ""),
         "stages.e.data: ${d.rows} is no file (got '${d.rows}'). "
         "Files of d: ${d.rejected}, ${d.train}, ${d.validation}."),
        (DATA + "  e: {kind: promote, registry: r, evaluation: §'${d}'}\n",
         "stages.e.evaluation: this has to be an evaluate stage (got '${d}'). Add a stage of kind evaluate."),
        (evaluate("v", ".") + "  e: {kind: promote, registry: r, evaluation: §'${v.candidate}'}\n",
         "stages.e.evaluation: this has to be an evaluate stage (got '${v.candidate}'). Evaluate stages: ${v}."),
        (evaluate("v", ".") + "  e: {kind: promote, registry: r, evaluation: §v}\n",
         "stages.e.evaluation: this has to be an evaluate stage (got 'v'). Evaluate stages: ${v}."),
        (evaluate("v", ".") + "  e: {kind: promote, registry: r, evaluation: §'${w}'}\n",
         "stages.e.evaluation: there is no stage 'w' (got '${w}'). Stages: v."),
        (evaluate("v", ".", rest=", champion: r")
         + "  e: {kind: promote, registry: r, evaluation: '${v}', gate: §candidat.score > 1}\n",
         "there is no candidat, at column 1 of the gate (got 'candidat.score > 1'). Did you mean candidate? "
         f"Available: {', '.join(sorted(GATE_NAMES))}."),
        (DATA + evaluate("e", ".").replace("score'}", "score', kwargs: {x: §'${d.rows}'}}"),
         "stages.e.reward.kwargs.x: a reward cannot refer to a stage's output (got '${d.rows}'). Write the value itself."),
    ],
)  # fmt: skip
def test_what_does_not_hold_between_stages_is_told(mistakes: Mistakes, stages: str, message: str | None) -> None:
    """The place is the one marked by §."""
    before, _, after = (HEAD + stages).partition("§")
    line, column = before.count("\n") + 1, len(before) - before.rfind("\n")
    found = mistakes(before + after)
    if message is not None:
        assert found == [f"p.yaml:{line}:{column}: {message}"]
    else:
        assert len(found) == 1 and found[0].startswith(f"p.yaml:{line}:"), found


def test_the_model_has_to_be_there_when_it_is_used(mistakes: Mistakes) -> None:
    assert mistakes(HEAD + evaluate("e", "${model}")) == [
        "p.yaml:4:30: stages.e.model is ${model}, and the pipeline has no `model`. "
        "Add `model:` to the pipeline, or name a folder or another stage's model."
    ]
    verl = f"  t: {{kind: verl, train: rows.jsonl, validation: rows.jsonl, {REWARD}, steps: 1, batch_size: 1, save_every: 1}}\n"
    assert mistakes(HEAD + verl) == [
        "p.yaml:4:3: stages.t.model is ${model}, and the pipeline has no `model`. "
        "Add `model:` to the pipeline, or name a folder or another stage's model."
    ]
    assert mistakes(HEAD + evaluate("e", "${model.path}")) == [
        "p.yaml:4:30: stages.e.model: the pipeline's model has no outputs (got '${model.path}'). Write ${model}."
    ]


def test_a_cycle_of_two_is_named_once(mistakes: Mistakes) -> None:
    stages = python("start", ", after: [a]") + python("a", ", after: [b]") + python("b", ", after: [a]")
    assert mistakes(HEAD + stages) == [
        "p.yaml:5:58: the stages wait for each other: a -> b -> a. Drop one of these references."
    ]


def test_a_long_chain_is_no_cycle(folder: Path) -> None:
    names = [f"s{number}" for number in range(1500)]
    stages = "".join(
        python(name, f", after: [{', '.join(names[max(0, index - 3) : index])}]") for index, name in enumerate(names)
    )
    (folder / "p.yaml").write_text(HEAD + stages)
    assert len(load("p.yaml").pipeline.stages) == 1500


@pytest.mark.parametrize(
    ("function", "message"),
    [
        ("rewrd.py:score", "there is no rewrd.py in {folder} (got 'rewrd.py'). Did you mean 'reward.py'? "
         "The path is relative to the pipeline file."),
        ("reward.py:scor", "reward.py defines no scor (got 'reward.py:scor'). Did you mean 'score'? "
         "Define it at the top level of reward.py."),
        ("../reward.py:score", "code that travels with a run lies in the folder of the pipeline file (got '../reward.py'). "
         "Copy it there, or install it as a package and name its module."),
        ("broken.py:f", "{folder}/broken.py:2:7 is not valid Python: invalid syntax (got 'def f(:'). Mend the file."),
        ("folder.py:f", "folder.py is a folder (got 'folder.py:f')"),
        ("no_such_module.x:f", "there is no module no_such_module beside the pipeline file or installed "
         "(got 'no_such_module.x:f'). Install it, or name a file beside the pipeline file, as in file.py:function."),
        ("json.decoder:JSONDecode", "json.decoder defines no JSONDecode (got 'json.decoder:JSONDecode'). "
         "Did you mean 'JSONDecoder'? Define it at the top level of decoder.py."),
        ("package.inner:nothing", "package.inner defines no nothing (got 'package.inner:nothing'). "
         "Define it at the top level of inner.py."),
    ],
)  # fmt: skip
def test_a_function_that_is_not_there_is_told_without_running_its_file(
    mistakes: Mistakes, folder: Path, function: str, message: str
) -> None:
    (folder / "broken.py").write_text("x = 1\ndef f(:\n")
    (folder / "folder.py").mkdir()
    (folder / "package").mkdir()
    (folder / "package" / "inner.py").write_text("raise SystemExit\n")
    found = mistakes(HEAD + python("a", function=function))
    assert found == [f"p.yaml:4:31: {message.format(folder=folder)}"]


@pytest.mark.parametrize(
    ("signature", "args", "message"),
    [
        ("context, count=100", "{}", None),
        ("count, *, path, context", "{count: 1, path: x}", None),
        ("**more", "{anything: 1}", None),
        ("count", "{cuont: 1}", "it takes no cuont, count is missing (got ['cuont']). Its signature is f(count)."),
        ("a, *, b, c=1", "{a: 1}", "b is missing (got ['a']). Its signature is f(a, *, b, c=1)."),
        ("a, /, **more", "{a: 1}", "a can only be given by place (got ['a']). Its signature is f(a, /, **more)."),
    ],
)
def test_args_that_a_function_does_not_take_are_told_without_running_it(
    mistakes: Mistakes, folder: Path, signature: str, args: str, message: str | None
) -> None:
    (folder / "f.py").write_text(f"raise SystemExit\ndef f({signature}): ...\n")
    text = HEAD + f"  a: {{kind: python, function: 'f.py:f', args: {args}}}\n"
    if message is None:
        (folder / "p.yaml").write_text(text)
        load("p.yaml")
    else:
        assert mistakes(text) == [f"p.yaml:4:47: f.py:f cannot be called with these args: {message}"]


@pytest.mark.parametrize(
    ("signature", "kwargs", "message"),
    [
        ("data_source, solution_str, ground_truth, extra_info=None", "{}", None),
        ("solution_str, ground_truth, **more", "{weight: 1}", None),
        ("*, data_source, solution_str, ground_truth, extra_info, weight", "{weight: 1}", None),
        ("solution_str, ground_truth, extra_info, data_source, context", "{}", "context is missing"),
        ("data_source, solution_str, ground_truth", "{}", "it takes no extra_info"),
        ("data_source, solution_str, ground_truth, extra_info", "{weight: 1}", "it takes no weight"),
    ],
)
def test_a_reward_that_verl_could_not_call_is_told_without_running_it(
    mistakes: Mistakes, folder: Path, signature: str, kwargs: str, message: str | None
) -> None:
    (folder / "f.py").write_text(f"raise SystemExit\nasync def f({signature}): ...\n")
    reward = f"reward: {{function: 'f.py:f', kwargs: {kwargs}}}"
    text = HEAD + f"  a: {{kind: data, source: {{jsonl: rows.jsonl}}, validation: 1, {reward}}}\n"
    if message is None:
        (folder / "p.yaml").write_text(text)
        load("p.yaml")
    else:
        (mistake,) = mistakes(text)
        assert f"f.py:f cannot be called as verl calls it: {message} (got [" in mistake
        assert mistake.endswith(f"Its signature is f({signature}).")


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("async def score(): ...", "score"),
        ("class score: ...", "score"),
        ("from json import loads as score", "score"),
        ("score = other = lambda: 1", "other"),
        ("a, score = 1, print", "score"),
        ("try:\n    import x\nexcept ImportError:\n    def score(): ...", "score"),
        ("if True:\n    pass\nelse:\n    def score(): ...", "score"),
        ("from json import *", "score"),
        ("def __getattr__(name): return print", "score"),
    ],
)
def test_all_ways_to_define_a_function_count(folder: Path, text: str, name: str) -> None:
    (folder / "f.py").write_text(text + "\n")
    (folder / "p.yaml").write_text(HEAD + python("a", function=f"f.py:{name}"))
    load("p.yaml")


def test_a_link_out_of_the_folder_is_refused(
    mistakes: Mistakes, folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    outside = tmp_path_factory.mktemp("outside") / "secret.py"
    outside.write_text("def f(): ...\n")
    (folder / "link.py").symlink_to(outside)
    [found] = mistakes(HEAD + python("a", function="link.py:f"))
    assert "lies in the folder of the pipeline file (got 'link.py')" in found


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("model: {path: §nowhere}", "the model folder does not exist, looked for at {folder}/nowhere (got 'nowhere'). "
         "Relative paths start at the folder of the pipeline file."),
        ("model: {path: §reward.py}", "the model folder does not exist, looked for at {folder}/reward.py (got 'reward.py'). "
         "Relative paths start at the folder of the pipeline file."),
        ("model: {gguf: §x.gguf}", "the GGUF file does not exist, looked for at {folder}/x.gguf (got 'x.gguf'). "
         "Relative paths start at the folder of the pipeline file."),
        ("model: {gguf: §'package:no_such_package'}", "the package no_such_package is not installed "
         "(got 'package:no_such_package'). Install the distribution that has it."),
        ("code: [reward.py, §missing]", "there is no missing in {folder} (got 'missing'). "
         "The path is relative to the pipeline file."),
        ("code: [§/etc/hostname]", "code that travels with a run lies in the folder of the pipeline file "
         "(got '/etc/hostname'). Copy it there, or install it as a package and name its module."),
    ],
)  # fmt: skip
def test_a_missing_file_of_the_pipeline_is_told(mistakes: Mistakes, folder: Path, line: str, message: str) -> None:
    before, _, after = f"version: 1\nname: p\n{line}\nstages:\n{python('a')}".partition("§")
    assert mistakes(before + after) == [
        f"p.yaml:3:{len(before) - before.rfind(chr(10))}: {message.format(folder=folder)}"
    ]


@pytest.mark.parametrize(
    "stage",
    [
        "  a: {kind: data, source: {jsonl: §row.jsonl}, validation: 1}\n",
        "  a: {kind: data, source: {jsonl: [rows.jsonl, §'*.json']}, validation: 1}\n",
        "  a: {kind: data, source: {jsonl: '*.jsonl'}, validation: {parquet: §v.parquet}}\n",
        evaluate("a", ".").replace("rows.jsonl", "rows.parquet").replace('"rows', '§"rows'),
        evaluate("a", ".").replace('"."', '§"no/model"'),
        f"  a: {{kind: verl, model: ., train: §t.parquet, validation: rows.jsonl, {REWARD}, steps: 1, batch_size: 1, save_every: 1}}\n",
    ],
)
def test_a_missing_data_file_is_told(mistakes: Mistakes, stage: str) -> None:
    before, _, after = (HEAD + stage).partition("§")
    [found] = mistakes(before + after)
    assert found.startswith(f"p.yaml:4:{len(before) - before.rfind(chr(10))}: ")
    assert "does not exist, looked for at" in found or "no file matches, looked for at" in found


LONG = "a" * 5000
TOO_LONG = "the path cannot be looked for: file name too long"
NO_TEXT = "a path holds no NUL and nothing that is not UTF-8"
NO_HOME = "there is no such home folder"


@pytest.mark.parametrize(
    ("head", "stage", "message"),
    [
        (f"code: [§{LONG}]\n", python("a"), TOO_LONG),
        ('code: [§"a\\0b"]\n', python("a"), NO_TEXT),
        ("code: [§loop]\n", python("a"), "the path cannot be looked for: "),
        (f"model: {{path: §{LONG}}}\n", python("a"), TOO_LONG),
        ('model: {path: §"a\\0b"}\n', python("a"), NO_TEXT),
        ("model: {path: §~nouser/x}\n", python("a"), NO_HOME),
        (f"model: {{gguf: §{LONG}}}\n", python("a"), TOO_LONG),
        ("", f'  a: {{kind: python, function: §"{LONG}.py:f"}}\n', TOO_LONG),
        ("", f'  a: {{kind: python, function: §"{LONG}:f"}}\n', TOO_LONG),
        ("", '  a: {kind: python, function: §"f\\0.py:f"}\n', NO_TEXT),
        ("", f"  a: {{kind: data, source: {{jsonl: §{LONG}}}, validation: 1}}\n", TOO_LONG),
        ("", '  a: {kind: data, source: {jsonl: §"*\\0"}, validation: 1}\n', NO_TEXT),
        ("", "  a: {kind: data, source: {jsonl: §~nouser/x}, validation: 1}\n", NO_HOME),
        (
            "",
            "  a: {kind: data, source: {jsonl: §'a**b'}, validation: 1}\n",
            "the path cannot be looked for: invalid pattern",
        ),
        ("", "  a: {kind: data, source: {jsonl: §/}, validation: 1}\n", "the file does not exist"),
    ],
)
def test_a_path_that_the_file_system_refuses_is_told_with_its_place(
    mistakes: Mistakes, folder: Path, head: str, stage: str, message: str
) -> None:
    (folder / "loop").symlink_to("loop")
    before, _, after = f"version: 1\nname: p\n{head}stages:\n{stage}".partition("§")
    [found] = mistakes(before + after)
    line = before.count("\n") + 1
    assert found.startswith(f"p.yaml:{line}:{len(before) - before.rfind(chr(10))}: {message}")


def test_code_that_is_nested_too_deeply_for_python_is_told(mistakes: Mistakes, folder: Path) -> None:
    (folder / "f.py").write_text("x = " + "-" * 100_000 + "1\n")
    [found] = mistakes(HEAD + python("a", function="f.py:f"))
    assert "f.py is not valid Python: it is nested too deeply" in found


def test_a_template_that_does_not_parse_is_told_in_jinjas_words(mistakes: Mistakes) -> None:
    stage = "  a: {kind: data, source: {jsonl: rows.jsonl}, validation: 1, answer: answer,\n    prompt: '{{ q'}\n"
    assert mistakes(HEAD + stage) == [
        "p.yaml:5:13: stages.a.prompt: this is no Jinja template: unexpected end of template, expected 'end of print "
        "statement' (line 1 of the template) (got '{{ q'). Mend the template."
    ]


def test_a_misspelt_data_set_of_reasoning_gym_is_told(mistakes: Mistakes) -> None:
    pytest.importorskip("reasoning_gym")
    stage = "  a: {kind: data, source: {reasoning_gym: {dataset: chian_sum, size: 4}}, validation: 1}\n"
    assert mistakes(HEAD + stage) == [
        "p.yaml:4:53: stages.a.source.reasoning_gym.dataset: reasoning-gym has no such data set (got 'chian_sum'). "
        "Did you mean 'chain_sum'? See reasoning_gym.factory.DATASETS."
    ]


def test_every_data_set_of_reasoning_gym_is_known(folder: Path) -> None:
    pytest.importorskip("reasoning_gym")
    from reasoning_gym.factory import DATASETS

    assert [name for name in DATASETS if unknown_dataset(name) is not None] == []


def test_verls_own_interpolations_and_free_text_are_no_references(folder: Path) -> None:
    (folder / "p.yaml").write_text(
        "version: 1\nname: p\nmodel: {builtin: tiny}\nstages:\n"
        "  d: {kind: data, source: {jsonl: rows.jsonl}, validation: 1, prompt: 'costs ${price}', system: '${x.y}'}\n"
        f"  t: {{kind: verl, train: '${{d.train}}', validation: '${{d.validation}}', {REWARD}, steps: 1, batch_size: 1, "
        "save_every: 1, overrides: {trainer.n: '${trainer.m}', a.b: 'x/${oc.env:HOME}'}}\n"
    )
    pipeline = load("p.yaml").pipeline
    assert pipeline.stage("d").needs() == frozenset()
    assert pipeline.stage("t").needs() == {"d"}


def test_a_pipeline_in_python_is_checked_the_same_way(folder: Path) -> None:
    reward = Reward(function="reward.py:scor")
    pipeline = Pipeline(
        name="p",
        stages=[
            DataStage(name="d", source=Source(jsonl="row.jsonl"), validation=1),
            VerlStage(
                name="t", train="${d.trian}", validation="${d}", reward=reward, steps=1, batch_size=1, save_every=1
            ),
            EvaluateStage(name="e", model="${x.model}", data="${d.validation}", reward=reward, after=["e"]),
            PromoteStage(name="q", registry="r", evaluation="${t}", gate="rows"),
            PromoteStage(name="r", registry="r", evaluation="${e}", gate="rows + 1", alias="best"),
            PythonStage(name="q", function="reward.py:score"),
        ],
    )
    errors = {error.where: error for error in check(pipeline, folder)}
    assert set(errors) == {
        "stages.d.source.jsonl",
        "stages.t.model",
        "stages.t.train",
        "stages.t.validation",
        "stages.t.reward.function",
        "stages.e.model",
        "stages.e.reward.function",
        "stages.e.after[0]",
        "stages.q.evaluation",
        "stages.r.gate",
        "stages.q.name",
    }
    assert errors["stages.d.source.jsonl"].code is ErrorCode.FILE_MISSING
    assert errors["stages.r.gate"].code is ErrorCode.GATE_INVALID
    right = Pipeline(
        name="p",
        model=Model(builtin="tiny"),
        stages=[PythonStage(name="a", function="reward.py:score", args={"m": "${model}"})],
    )
    assert check(right, folder) == []
