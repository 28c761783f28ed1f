from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from verl_workflow.errors import UserErrors
from verl_workflow.spec import (
    ChooseStage,
    Document,
    Model,
    Pipeline,
    PythonStage,
    Reward,
    VerlStage,
    check,
    dump,
    load,
    resolve,
)
from verl_workflow.spec._stage import Member

SWEEP = """\
version: 1
name: sweep
params: {slow: {type: number, default: 0.001}}
model: {builtin: tiny}
stages:
  prepare:
    kind: data
    source: {reasoning_gym: {dataset: chain_sum, size: 20}}
    validation: 4
  train:
    kind: verl
    matrix:
      rate: ["${params.slow}", 0.005]
      rollouts: [4, 8]
    train: ${prepare.train}
    validation: ${prepare.validation}
    reward: {function: "task.py:score"}
    steps: 2
    batch_size: 4
    learning_rate: ${matrix.rate}
    rollouts: ${matrix.rollouts}
    save_every: 1
    overrides: {trainer.project_name: "rate-${matrix.rate}"}
  evaluate:
    kind: evaluate
    matrix: train
    model: ${train.model}
    data: ${prepare.validation}
    reward: {function: "task.py:score"}
  best:
    kind: choose
    of: evaluate
    by: candidate.score
  last:
    kind: python
    function: task.py:tell
    after: [train]
    args: {model: "${best.model}"}
"""


@pytest.fixture
def written(tmp_path: Path) -> Any:
    (tmp_path / "task.py").write_text(
        "def score(data_source, solution_str, ground_truth, extra_info=None):\n    return 0.0\n\n\n"
        "def tell(model):\n    return model\n"
    )

    def write(*changes: tuple[str, str]) -> Document:
        text = SWEEP
        for old, new in changes:
            assert old in text
            text = text.replace(old, new)
        (tmp_path / "sweep.yaml").write_text(text)
        return load(tmp_path / "sweep.yaml")

    return write


def mistakes(written: Any, *changes: tuple[str, str]) -> list[str]:
    with pytest.raises(UserErrors) as caught:
        written(*changes)
    return [str(error) for error in caught.value.errors]


def test_each_combination_makes_a_member_with_its_values(written: Any) -> None:
    pipeline = written().pipeline
    trains = [stage for stage in pipeline.stages if stage.kind == "verl"]
    assert [stage.name for stage in trains] == ["train-1", "train-2", "train-3", "train-4"]
    assert [(stage.learning_rate, stage.rollouts) for stage in trains] == [
        (0.001, 4),
        (0.001, 8),
        (0.005, 4),
        (0.005, 8),
    ]
    assert trains[2].overrides == {"trainer.project_name": "rate-0.005"}
    assert all(stage.matrix is None for stage in trains)


def test_a_stage_that_sweeps_along_has_the_same_members(written: Any) -> None:
    pipeline = written().pipeline
    evaluations = [stage for stage in pipeline.stages if stage.kind == "evaluate"]
    assert [(stage.name, stage.model) for stage in evaluations] == [
        (f"evaluate-{number}", f"${{train-{number}.model}}") for number in (1, 2, 3, 4)
    ]


def test_the_choice_knows_its_members_and_who_comes_after_a_sweep_comes_after_all(written: Any) -> None:
    pipeline = written().pipeline
    best = pipeline.stage("best")
    assert best.needs() == {"evaluate"}
    members = pipeline.members("evaluate")
    assert [member.name for member in members] == [f"evaluate-{number}" for number in (1, 2, 3, 4)]
    assert members[1].member == Member(of="evaluate", values={"rate": 0.001, "rollouts": 8})
    assert pipeline.stage("last").needs() == {"best", "train"}


def test_what_was_loaded_is_the_same_after_being_written_and_loaded_again(written: Any, tmp_path: Path) -> None:
    pipeline = written().pipeline
    (tmp_path / "again.yaml").write_text(dump(pipeline))
    assert load(tmp_path / "again.yaml").pipeline == pipeline


def test_in_python_the_same_sweep_is_the_same(written: Any, tmp_path: Path) -> None:
    reward = Reward(function="task.py:score")
    (tmp_path / "task.py").touch()
    train: Any = VerlStage(
        name="train",
        matrix={"rate": [0.001, 0.005]},
        train="a.parquet",
        validation="a.parquet",
        reward=reward,
        steps=2,
        batch_size=4,
        learning_rate="${matrix.rate}",  # type: ignore[arg-type]
        save_every=1,
    )
    written()
    (tmp_path / "a.parquet").touch()
    stages: Any = [train, ChooseStage(name="best", of="train", by="reward.last")]
    found = resolve(Pipeline(name="p", model=Model(builtin="tiny"), stages=stages), tmp_path).pipeline
    assert [stage.name for stage in found.stages] == ["train-1", "train-2", "best"]
    assert found.stages[1].learning_rate == 0.005


def test_a_members_mistake_is_told_where_the_sweep_stands(written: Any) -> None:
    (message,) = mistakes(written, ("rollouts: [4, 8]", "rollouts: [4, x]"))
    line = SWEEP.splitlines().index("      rollouts: [4, 8]") + 1
    assert message.endswith(f"sweep.yaml:{line}:21: stages.train.rollouts should be a whole number (got 'x')")


def test_what_no_value_has_brought_about_is_told_once_at_its_field(written: Any) -> None:
    (message,) = mistakes(written, ("    batch_size: 4\n", "    batch_size: -4\n"))
    line = SWEEP.splitlines().index("    batch_size: 4") + 1
    assert message.endswith(f"sweep.yaml:{line}:17: stages.train.batch_size should be greater than 0 (got -4)")


def test_what_a_document_says_of_a_members_field_is_where_its_value_stands(written: Any) -> None:
    document = written()
    lines = SWEEP.splitlines()
    assert document.where(("stages", "train-2", "rollouts")).endswith(
        f":{lines.index('      rollouts: [4, 8]') + 1}:21"
    )
    assert document.where(("stages", "train-2", "steps")).endswith(f":{lines.index('    steps: 2') + 1}:5")


def test_combinations_that_are_excluded_make_no_members(written: Any) -> None:
    pipeline = written(
        ("      rollouts: [4, 8]", "      rollouts: [4, 8]\n    exclude: [{rate: 0.005, rollouts: 8}]")
    ).pipeline
    found = [stage.member.values for stage in pipeline.members("evaluate")]
    assert found == [{"rate": 0.001, "rollouts": 4}, {"rate": 0.001, "rollouts": 8}, {"rate": 0.005, "rollouts": 4}]


def test_a_chain_of_stages_goes_along_with_one_matrix(written: Any) -> None:
    longer = """\
  second:
    kind: verl
    matrix: evaluate
    model: ${train.model}
    train: ${prepare.train}
    validation: ${evaluate.data}
    reward: {function: "task.py:score"}
    steps: 2
    batch_size: 4
    save_every: 1
    learning_rate: ${matrix.rate}
    after: [train, prepare]
  best:"""
    stage = written(("  best:", longer), ("${evaluate.data}", "${prepare.validation}")).pipeline.stage("second-3")
    assert stage.model == "${train-3.model}"
    assert stage.after == ["train-3", "prepare"]
    assert stage.learning_rate == 0.005


def test_a_reference_can_be_a_value_and_paths_are_those_beside_the_file(written: Any, tmp_path: Path) -> None:
    (tmp_path / "a.parquet").touch()
    pipeline = written(
        ("      rate: [", '      data: [a.parquet, "${prepare.train}"]\n      rate: ['),
        ("    train: ${prepare.train}", "    train: ${matrix.data}"),
        ("      rollouts: [4, 8]\n", "      rollouts: [4]\n"),
    ).pipeline
    assert [stage.train for stage in pipeline.members("train")] == [str(tmp_path / "a.parquet")] * 2 + [
        "${prepare.train}"
    ] * 2
    assert pipeline.stage("train-1").needs() == {"prepare"}


def test_the_winner_hands_on_what_its_kind_has(written: Any) -> None:
    promoted = """\
  promote:
    kind: promote
    registry: sweep
    evaluation: ${best}
  last:"""
    sound = written(("  last:", promoted), ("    data: ${prepare", "    champion: sweep\n    data: ${prepare"))
    assert sound.pipeline.stage("promote").needs() == {"best"}
    (message,) = mistakes(written, ("  last:", promoted))
    assert "evaluate compares with no champion" in message
    (message,) = mistakes(written, ('"${best.model}"', '"${best.modle}"'))
    assert "the stage best has no output 'modle'" in message
    assert "Did you mean 'model'? A stage of kind choose has: candidate, champion," in message


@pytest.mark.parametrize(
    ("by", "said"),
    [
        ("candidate.acc", None),
        ("difference.mean", None),
        ("${train.reward.last}", None),
        ("${train.step}", None),
        ("candidate", "this is no figure of evaluate (got 'candidate')"),
        ("candidat.score", "Did you mean 'candidate.score'?"),
        ("${train.reward.lst}", "Did you mean 'reward.last'?"),
        ("${prepare.rows.train}", "prepare does not have the members of evaluate"),
        ("${nothing.step}", "there is no stage 'nothing'"),
        ("x ${train.step}", "a reference has to be the whole value"),
    ],
)
def test_the_figure_is_one_that_the_members_have(written: Any, by: str, said: str | None) -> None:
    change = ("by: candidate.score", f"by: {by}")
    if said is None:
        assert written(change).pipeline.stage("best").by == by
    else:
        (message,) = mistakes(written, change)
        assert said in message
        assert f"sweep.yaml:{SWEEP.splitlines().index('    by: candidate.score') + 1}:9: stages.best.by: " in message


ROLLOUTS = "      rollouts: [4, 8]\n"


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("matrix: train", "matrix: trian", "Did you mean 'train'?"),
        ("matrix: train", "matrix: prepare", "the stage prepare has no matrix to follow"),
        ("matrix: train", "matrix: evaluate", "these stages follow each other's matrix"),
        ("of: evaluate", "of: evalute", "Did you mean 'evaluate'?"),
        ("of: evaluate", "of: prepare", "Stages with a matrix: train, evaluate."),
        ("      rate: [", "      rate: []\n      other: [", "stages.train.matrix.rate is empty"),
        (ROLLOUTS, "      rollouts: 4\n", "stages.train.matrix.rollouts should be a list (got 4)"),
        (ROLLOUTS, "      rollouts: [4, 4]\n", "matrix.rollouts has this value twice (got 4)"),
        (ROLLOUTS, ROLLOUTS + "      seed: [1, 2]\n", "nothing in the stage refers to matrix.seed"),
        (ROLLOUTS, ROLLOUTS + "    exclude: [{rate: 5}]\n", "this leaves nothing out"),
        (ROLLOUTS, ROLLOUTS + "    exclude: [{rat: 0.005}]\n", "Did you mean 'rate'? The matrix has: rate, rollouts."),
        (ROLLOUTS, ROLLOUTS + "    exclude: [{rollouts: 4}, {rollouts: 8}]\n", "every combination is left out"),
        ("matrix: train\n", "matrix: train\n    exclude: [{rate: 0.005}]\n", "the combinations are those of train"),
        ("    kind: data\n", "    kind: data\n    failures: tolerate\n", "no effect in a stage without a matrix"),
        ("    kind: data\n", "    kind: data\n    exclude: [{rate: 1}]\n", "no effect in a stage without a matrix"),
        ("${matrix.rollouts}", "${matrix.rollout}", "Did you mean 'rollouts'? The matrix has: rate, rollouts."),
        ("model: ${train.model}\n    data", "model: ${best.model}\n    data", "the stages wait for each other"),
        ("    kind: choose\n    of: evaluate\n", "    kind: choose\n", "stages.best has no 'of'"),
        ('{model: "${best.model}"}', '{model: "${evaluate.model}"}', "Refer to the one that is chosen, ${best.model}"),
        ('{model: "${best.model}"}', '{model: "${train.model}"}', "`kind: choose` and `of: train`"),
        ('{model: "${best.model}"}', '{model: "${matrix.rate}"}', "the stage has no matrix"),
        ('{model: "${best.model}"}', '{model: "${train-2.model}"}', "there is no stage 'train-2'"),
        ("[4, 8]", str(list(range(2, 35))), "66 combinations, and 64 are the most"),
        ("  last:", "  train-1:", "the name train-1 is taken by a member of train"),
        ("  last:", "  matrix:", "a stage cannot be called matrix"),
        ("    of: evaluate\n", "    of: evaluate\n    matrix: train\n", "unknown key in stages.best (got 'matrix')"),
    ],
)
def test_what_is_wrong_with_a_sweep_is_told_once(written: Any, old: str, new: str, said: str) -> None:
    messages = mistakes(written, (old, new))
    assert [said in message for message in messages] == [True], messages


def test_a_reference_to_a_stage_with_a_matrix_needs_one_of_its_members(written: Any) -> None:
    messages = mistakes(written, ("    matrix: train\n", ""))
    assert "stages.evaluate.model: the stage train has a matrix, and so there are 4 of it" in messages[0]
    assert "or write `matrix: train` here, for one stage for each of them." in messages[0]
    assert "stages.best.of: this has to be a stage with a matrix" in messages[1]


def test_a_stage_whose_members_would_have_too_long_names_is_refused(written: Any) -> None:
    (message, *_) = mistakes(written, ("  evaluate:\n", f"  {'e' * 63}:\n"), ("of: evaluate", f"of: {'e' * 63}"))
    assert "the name is too long for members such as" in message


def test_a_pipeline_object_with_a_matrix_is_checked_as_it_is(written: Any, tmp_path: Path) -> None:
    written()
    stages: Any = [
        PythonStage(name="a", function="task.py:tell", matrix={"x": [1]}, args={"model": "${matrix.y}"}),
        PythonStage(name="b", function="task.py:tell", args={"model": "${a.model}"}),
    ]
    assert [error.where for error in check(Pipeline(name="p", stages=stages), tmp_path)] == [
        "stages.a.args.model",
        "stages.b.args.model",
    ]


def test_the_example_is_valid() -> None:
    document = load(Path(__file__).parents[2] / "pipelines/sweep.yaml")
    assert [stage.name for stage in document.pipeline.stages][-2:] == ["best", "promote"]
