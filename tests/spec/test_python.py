from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from verl_workflow.errors import ErrorCode, UserError, UserErrors
from verl_workflow.spec import Param, Pipeline, PythonStage, dump, load, pipeline_from_python, resolve

PIPELINE = """
from shared import REWARD
from verl_workflow import DataStage, Model, Param, Pipeline, Source, VerlStage

pipeline = Pipeline(
    name="p-${params.tag}",
    model=Model(builtin="tiny"),
    params={"steps": Param(type="integer", default=3, minimum=1), "tag": Param(type="string", default="a")},
    stages=[
        DataStage(name="prepare", source=Source(jsonl="rows.jsonl"), validation="${params.steps}"),
        VerlStage(
            name="train",
            train="${prepare.train}",
            validation="${prepare.validation}",
            reward=REWARD,
            steps="${params.steps}",
            batch_size=2,
            rollouts="${params.steps}",
            save_every=1,
        ),
    ],
)
other = 3
"""


@pytest.fixture
def file(folder: Path) -> Path:
    (folder / "shared.py").write_text("from verl_workflow import Reward\nREWARD = Reward(function='reward.py:score')\n")
    (folder / "p.py").write_text(PIPELINE)
    return folder / "p.py"


def test_a_pipeline_in_python_loads_with_params_put_in(file: Path) -> None:
    document = load("p.py", {"steps": "5"})
    assert document.path == file
    assert document.params == {"steps": 5, "tag": "a"}
    assert document.pipeline.name == "p-a"
    assert document.pipeline.stage("train").steps == 5
    assert document.pipeline.stage("prepare").validation == 5
    assert document.pipeline.stage("prepare").source.jsonl == str(file.parent / "rows.jsonl")
    assert document.where(("stages", "train", "steps")) == "p.py"
    assert load(f"{file}:pipeline").pipeline.stage("train").steps == 3


def test_python_and_yaml_are_two_forms_of_one_pipeline(file: Path) -> None:
    _, pipeline = pipeline_from_python("p.py")
    (file.parent / "p.yaml").write_text(dump(pipeline))
    assert load("p.yaml", {"steps": "4"}).pipeline == load("p.py", {"steps": "4"}).pipeline


def test_a_value_that_a_param_may_not_have_is_told_with_its_field(file: Path) -> None:
    with pytest.raises(UserErrors) as caught:
        load("p.py", {"steps": "1"})
    assert "grpo compares answers to one prompt" in str(caught.value)
    file.write_text(
        PIPELINE.replace("batch_size=2", 'batch_size="${params.tag}"').replace("${prepare.train}", "${x.y}")
    )
    with pytest.raises(UserErrors) as caught:
        load("p.py")
    assert [str(error) for error in caught.value.errors] == [
        "p.py: stages.train.batch_size should be a whole number (got 'a')",
        "p.py: stages.train.train: there is no stage 'x' (got '${x.y}'). Stages: prepare.",
    ]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("x = 1\n", r"^p\.py: the file has no Pipeline in a variable 'pipeline'. Write `pipeline = Pipeline"),
        ("pipeline = 1\n", r"^p\.py: the file has no Pipeline in a variable 'pipeline' \(got 1\)"),
        (
            PIPELINE.replace("pipeline = ", "pipelin = "),
            r"Did you mean 'pipelin'\? Name one of these: p\.py:pipelin\.$",
        ),
        ("x = 1\n1 / 0\n", r"^p\.py:2: the pipeline file raised ZeroDivisionError: division by zero"),
        ("x = 1\ndef f(:\n", r"^p\.py:2:7: the pipeline file raised SyntaxError: invalid syntax"),
        ("import no_such_module\n", r"^p\.py:1: .*ModuleNotFoundError: No module named 'no_such_module'"),
        ("import sys; sys.exit(3)\n", r"^p\.py:1: the pipeline file raised SystemExit: 3"),
        (
            "from verl_workflow import Pipeline, PythonStage\n\npipeline = Pipeline(name='p', stages=[])\n",
            r"^p\.py:3: Pipeline\.stages: ",
        ),
        (
            "from verl_workflow import Retry\nRetry(attempts='x', z=1)\n",
            r"(?s)^p\.py:2: Retry\.attempts: .*p\.py:2: Retry\.z: ",
        ),
    ],
)
def test_a_python_file_that_yields_no_pipeline_is_told(file: Path, text: str, message: str) -> None:
    file.write_text(text)
    with pytest.raises(UserError, match=message) as caught:
        load("p.py")
    assert "http" not in str(caught.value)


def test_a_python_file_that_is_not_there(folder: Path) -> None:
    with pytest.raises(UserError, match=r"^q\.py: the pipeline file does not exist") as caught:
        load("q.py:pipeline")
    assert caught.value.code is ErrorCode.FILE_MISSING


def test_a_pipeline_object_is_resolved_like_a_file(folder: Path) -> None:
    stage = PythonStage(name="a", function="reward.py:score", cpus="${params.n}")  # type: ignore[arg-type]
    pipeline = Pipeline(name="p", params={"n": Param(type="number", default=2)}, stages=[stage])
    document = resolve(pipeline, folder, {"n": 0.5})
    assert document.pipeline.stage("a").cpus == 0.5
    assert document.path.parent == folder
    with pytest.raises(UserErrors, match=r"stages\.a\.function: .*no missing\.py|no missing\.py") as caught:
        resolve(Pipeline(name="p", stages=[PythonStage(name="a", function="missing.py:f")]), folder)
    assert caught.value.errors[0].where == "stages.a.function"


def test_importing_and_loading_stay_light(good: Path) -> None:
    program = (
        "import sys, verl_workflow\n"
        "assert 'pydantic' not in sys.modules\n"
        "verl_workflow.load(sys.argv[1])\n"
        "heavy = {'ray', 'torch', 'verl', 'transformers', 'pandas', 'pyarrow', 'numpy'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
        "from verl_workflow import *\n"
        "assert Pipeline.__name__ == 'Pipeline' and issubclass(UserErrors, UserError)\n"
    )
    subprocess.run([sys.executable, "-c", program, str(good)], check=True)


def test_the_public_names_are_there() -> None:
    import verl_workflow

    assert all(getattr(verl_workflow, name) is not None for name in verl_workflow.__all__)
    assert set(verl_workflow.__all__) <= set(dir(verl_workflow))
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        verl_workflow.nothing  # noqa: B018


def test_values_nested_past_what_can_be_written_are_refused() -> None:
    nested: list[object] = []
    for _ in range(300):
        nested = [nested]
    with pytest.raises(ValueError, match="is nested more than 100 deep"):
        PythonStage(name="a", function="json:dumps", args={"x": nested})


def test_the_nearest_right_spelling_of_a_field_is_named(folder: Path) -> None:
    (folder / "p.py").write_text(
        "from verl_workflow import DataStage, Source\n"
        "DataStage(name='d', source=Source(jsonl='rows.jsonl'), validation=1, promt='x')\n"
    )
    with pytest.raises(UserErrors, match=r"DataStage.promt: .*Did you mean 'prompt'\?"):
        pipeline_from_python("p.py")
