"""The data stage on real files through Ray Data."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from verl_workflow.artifacts import Artifact
from verl_workflow.data import run_data_stage
from verl_workflow.data._read import gym_fragments
from verl_workflow.errors import ErrorCode, UserError
from verl_workflow.pipeline import StageContext
from verl_workflow.spec import DataStage

pytestmark = pytest.mark.usefixtures("ray_cluster")

Run = Callable[..., dict[str, Any]]


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """Runs a stage whose files lie in `tmp_path`; each call is a new attempt."""
    attempts = 0

    def call(inputs: dict[str, Any] | None = None, report: Any = None, **fields: Any) -> dict[str, Any]:
        nonlocal attempts
        attempts += 1
        context = StageContext(
            run_id="r",
            stage="prepare",
            attempt=attempts,
            epoch=1,
            storage=str(tmp_path / "store"),
            records="runs/r/0123456789abcdef",
            root=tmp_path / "store",
            code_dir=tmp_path,
            inputs=inputs or {},
            report=report or (lambda _: None),
        )
        return run_data_stage(DataStage.model_validate({"name": "prepare", **fields}), context)

    return call


def questions(count: int, first: int = 0) -> list[dict[str, Any]]:
    return [
        {"prompt": [{"role": "user", "content": f"{n} + 1?"}], "answer": n + 1, "extra_info": {"level": n % 3}}
        for n in range(first, first + count)
    ]


def write_lines(path: Path, rows: list[Any]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def read(output: dict[str, Any], split: str) -> list[dict[str, Any]]:
    return pq.read_table(output[split]["path"]).to_pylist()


def asked(output: dict[str, Any], split: str) -> list[str]:
    return [row["prompt"][-1]["content"] for row in read(output, split)]


def test_json_lines_become_verls_schema(tmp_path: Path, run: Run) -> None:
    write_lines(tmp_path / "sums.jsonl", questions(20))
    output = run(source={"jsonl": "sums.jsonl"}, validation=4, answer="answer")
    assert output["rows"] == {"train": 16, "validation": 4, "rejected": 0}
    assert output["rejected"] is None
    table = pq.read_table(output["train"]["path"])
    message = pa.struct([("role", pa.string()), ("content", pa.string())])
    assert table.schema.field("prompt").type == pa.list_(message)
    assert table.schema.field("reward_model").type == pa.struct([("style", pa.string()), ("ground_truth", pa.string())])
    assert table.schema.field("extra_info").type == pa.struct(
        [("index", pa.int64()), ("split", pa.string()), ("level", pa.int64())]
    )
    row = read(output, "validation")[0]
    number = int(row["prompt"][0]["content"].split()[0])
    assert row["reward_model"] == {"style": "rule", "ground_truth": str(number + 1)}
    assert row["extra_info"] == {"index": 0, "split": "validation", "level": number % 3}
    assert row["data_source"] == "sums"
    Artifact.from_json(output["train"]).verify()


def test_verls_own_loader_keeps_every_row(tmp_path: Path, run: Run) -> None:
    write_lines(tmp_path / "sums.jsonl", questions(6))
    output = run(source={"jsonl": "sums.jsonl"}, validation=2, answer="answer")
    import datasets

    loaded = datasets.load_dataset("parquet", data_files=output["train"]["path"], cache_dir=str(tmp_path / "cache"))
    assert len(loaded["train"]) == 4
    assert loaded["train"][0]["prompt"][0]["role"] == "user"


def test_parquet_globs_keep_source_order_and_a_template_fills_in(tmp_path: Path, run: Run) -> None:
    (tmp_path / "data").mkdir()
    for part in range(3):
        table = pa.table({"q": [f"q{part}{n}" for n in range(10)], "a": list(range(10))})
        pq.write_table(table, tmp_path / "data" / f"part{part}.parquet", row_group_size=3)
    output = run(source={"parquet": "data/*.parquet"}, validation=5, prompt="Say {{ q }}.", answer="a")
    train = asked(output, "train")
    assert len(train) == 25 and train == sorted(train)
    assert {row["data_source"] for row in read(output, "train")} == {"part0", "part1", "part2"}


def test_validation_is_never_trained_on_and_does_not_depend_on_the_order(tmp_path: Path, run: Run) -> None:
    write_lines(tmp_path / "one.jsonl", questions(50))
    write_lines(tmp_path / "two.jsonl", questions(50)[::-1])
    one = run(source={"jsonl": "one.jsonl"}, validation=10, answer="answer")
    two = run(source={"jsonl": "two.jsonl"}, validation=10, answer="answer")
    assert not set(asked(one, "train")) & set(asked(one, "validation"))
    assert set(asked(one, "validation")) == set(asked(two, "validation"))
    assert len(set(asked(one, "train")) | set(asked(one, "validation"))) == 50


def test_the_same_input_gives_the_same_bytes_wherever_it_lies(tmp_path: Path, run: Run) -> None:
    (tmp_path / "moved").mkdir()
    write_lines(tmp_path / "sums.jsonl", [*questions(200), {"prompt": None}])
    write_lines(tmp_path / "moved" / "sums.jsonl", [*questions(200), {"prompt": None}])
    first = run(source={"jsonl": "sums.jsonl"}, validation=9, answer="answer", max_rejected=0.1)
    again = run(source={"jsonl": "moved/sums.jsonl"}, validation=9, answer="answer", max_rejected=0.1)
    assert [first[split]["sha256"] for split in ("train", "validation")] == [
        again[split]["sha256"] for split in ("train", "validation")
    ]
    assert first["train"]["path"] != again["train"]["path"]


def test_a_validation_source_of_its_own_is_held_out_of_training(tmp_path: Path, run: Run) -> None:
    write_lines(tmp_path / "train.jsonl", questions(10))
    write_lines(tmp_path / "test.jsonl", questions(4, first=8))
    output = run(source={"jsonl": "train.jsonl"}, validation={"jsonl": "test.jsonl"}, answer="answer", max_rejected=0.5)
    assert asked(output, "validation") == ["8 + 1?", "9 + 1?", "10 + 1?", "11 + 1?"]
    assert asked(output, "train") == [f"{n} + 1?" for n in range(8)]
    refused = [json.loads(line) for line in Path(output["rejected"]["path"]).read_text().splitlines()]
    assert [(row["row"], row["reason"]) for row in refused] == [(9, "held_out"), (10, "held_out")]


def test_rejected_rows_are_listed_with_source_row_and_reason(tmp_path: Path, run: Run) -> None:
    rows = questions(8)
    rows[2] = {"prompt": "2 + 1?", "answer": 3}
    rows[4] = {**rows[4], "answer": None}
    rows[6] = rows[0]
    write_lines(tmp_path / "mixed.jsonl", rows)
    output = run(source={"jsonl": "mixed.jsonl"}, validation=1, answer="answer", max_rejected=0.4)
    assert output["rows"] == {"train": 4, "validation": 1, "rejected": 3} and output["rejected"]["rows"] == 3
    refused = [json.loads(line) for line in Path(output["rejected"]["path"]).read_text().splitlines()]
    assert [(row["row"], row["reason"]) for row in refused] == [
        (3, "prompt_is_string"),
        (5, "missing_answer"),
        (7, "duplicate"),
    ]
    assert all(row["source"] == str(tmp_path / "mixed.jsonl") and row["detail"] for row in refused)


def test_too_many_rejected_rows_fail_with_counts_examples_and_the_file(tmp_path: Path, run: Run) -> None:
    write_lines(tmp_path / "strings.jsonl", [{"prompt": f"{n}?", "answer": n} for n in range(10)])
    with pytest.raises(UserError) as caught:
        run(source={"jsonl": "strings.jsonl"}, validation=2, answer="answer")
    message = str(caught.value)
    assert caught.value.code is ErrorCode.DATA_INVALID
    assert "10 of 10 rows" in message and "10 prompt_is_string" in message
    assert "strings.jsonl:1" in message and "{{ prompt }}" in message
    assert len(Path(caught.value.where).read_text().splitlines()) == 10


def test_a_line_that_is_not_json_is_named(tmp_path: Path, run: Run) -> None:
    good = json.dumps(questions(1)[0])
    (tmp_path / "bad.jsonl").write_text(f"{good}\n\n{{'a': 1}}\n")
    with pytest.raises(UserError, match=r"bad\.jsonl:3: the line is not JSON") as caught:
        run(source={"jsonl": "bad.jsonl"}, validation=1, answer="answer", max_rejected=1.0)
    assert caught.value.code is ErrorCode.DATA_INVALID


def test_a_truncated_parquet_file_is_named(tmp_path: Path, run: Run) -> None:
    pq.write_table(pa.table({"q": ["x"] * 1000, "a": list(range(1000))}), tmp_path / "cut.parquet")
    content = (tmp_path / "cut.parquet").read_bytes()
    (tmp_path / "cut.parquet").write_bytes(content[: len(content) // 2])
    with pytest.raises(UserError, match=r"cut\.parquet: the data file cannot be read") as caught:
        run(source={"parquet": "cut.parquet"}, validation=1, prompt="{{ q }}", answer="a")
    assert caught.value.code is ErrorCode.DATA_INVALID


def test_damage_inside_a_parquet_file_is_named_with_its_row(tmp_path: Path, run: Run) -> None:
    table = pa.table({"q": [f"question {n}" for n in range(100)], "a": list(range(100))})
    file = tmp_path / "hurt.parquet"
    pq.write_table(table, file, row_group_size=50, compression="zstd", use_dictionary=False)
    start = pq.ParquetFile(file).metadata.row_group(1).column(0).data_page_offset
    content = bytearray(file.read_bytes())
    content[start : start + 200] = b"\xff" * 200
    file.write_bytes(content)
    with pytest.raises(UserError, match=r"hurt\.parquet:51: the parquet file cannot be read"):
        run(source={"parquet": "hurt.parquet"}, validation=1, prompt="{{ q }}", answer="a")


@pytest.mark.parametrize("name", ["empty.jsonl", "blank.jsonl", "empty.parquet", "rows0.parquet"])
def test_a_file_without_rows_is_refused(tmp_path: Path, run: Run, name: str) -> None:
    (tmp_path / name).write_bytes(b"\n\n" if name.startswith("blank") else b"")
    if name == "rows0.parquet":
        pq.write_table(pa.table({"q": pa.array([], pa.string())}), tmp_path / name)
    with pytest.raises(UserError, match="rows") as caught:
        run(source={name.split(".")[1]: name}, validation=1, prompt="{{ q }}", answer="a")
    assert caught.value.code is ErrorCode.DATA_INVALID and name in str(caught.value)


def test_a_missing_file_is_named(tmp_path: Path, run: Run) -> None:
    with pytest.raises(UserError) as caught:
        run(source={"parquet": ["nope/*.parquet"]}, validation=1)
    assert caught.value.code is ErrorCode.FILE_MISSING and "nope/*.parquet" in str(caught.value)


def test_fewer_rows_than_are_held_out_is_an_error(tmp_path: Path, run: Run) -> None:
    write_lines(tmp_path / "few.jsonl", questions(4))
    with pytest.raises(UserError, match="4 distinct rows"):
        run(source={"jsonl": "few.jsonl"}, validation=4, answer="answer")


def test_a_reference_to_another_stages_file_is_read(tmp_path: Path, run: Run) -> None:
    write_lines(tmp_path / "made.jsonl", questions(5))
    inputs = {
        "collect": {
            "plain": str(tmp_path / "made.jsonl"),
            "file": Artifact.of(tmp_path / "made.jsonl").to_json(),
        }
    }
    plain = run(inputs, source={"jsonl": "${collect.plain}"}, validation=1, answer="answer")
    artifact = run(inputs, source={"jsonl": ["${collect.file}"]}, validation=1, answer="answer")
    assert plain["rows"]["train"] == 4
    assert plain["train"]["sha256"] == artifact["train"]["sha256"]


def test_progress_is_reported(tmp_path: Path, run: Run) -> None:
    write_lines(tmp_path / "many.jsonl", questions(2500))
    facts: list[Any] = []
    run(source={"jsonl": "many.jsonl"}, validation=10, answer="answer", report=facts.append)
    assert [fact["rows"] for fact in facts] == [1000, 2000, 2500]
    assert facts[-1]["train"] == 2490


GYM = {
    "dataset": "chain_sum",
    "config": {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1},
}


def test_reasoning_gym_gives_as_many_distinct_questions_as_asked_for(run: Run) -> None:
    output = run(
        source={"reasoning_gym": {**GYM, "size": 96, "seed": 3}},
        validation=32,
        prompt="{{ question }} Answer with the number only.",
    )
    assert output["rows"] == {"train": 64, "validation": 32, "rejected": 0}
    row = read(output, "train")[0]
    assert row["data_source"] == "reasoning_gym/chain_sum"
    assert row["prompt"][0]["content"].endswith("= Answer with the number only.")
    expression = json.loads(row["extra_info"]["metadata"])["expression"]
    assert str(eval(expression)) == row["reward_model"]["ground_truth"]


@pytest.mark.parametrize(("start", "stop"), [(0, 96), (160, 320), (0, 2500), (5000, 45_001)])
def test_workers_share_the_questions_of_reasoning_gym_without_gap_or_overlap(start: int, stop: int) -> None:
    fragments = gym_fragments("chain_sum", {}, 1, start, stop)
    rows = [row for part in fragments for row in range(part["first"], part["first"] + part["part"])]
    assert rows == list(range(start, stop))
    assert len(fragments) <= 8
    assert len(fragments) == 1 or fragments[0]["part"] >= 1000, "a worker takes seconds to import reasoning-gym"


def test_reasoning_gym_that_runs_out_of_questions_says_so(run: Run) -> None:
    with pytest.raises(UserError, match=r"made 200 distinct questions in 6000 draws"):
        run(source={"reasoning_gym": {**GYM, "size": 300}}, validation=32)


def test_a_misspelt_reasoning_gym_dataset_gets_a_suggestion(run: Run) -> None:
    with pytest.raises(UserError, match="Did you mean 'chain_sum'"):
        run(source={"reasoning_gym": {"dataset": "chain_sums", "size": 4}}, validation=1)
    with pytest.raises(UserError, match="refuses the config of chain_sum"):
        run(source={"reasoning_gym": {"dataset": "chain_sum", "size": 4, "config": {"terms": 2}}}, validation=1)


def test_a_reward_that_only_takes_right_answers_is_refused(tmp_path: Path, run: Run) -> None:
    write_lines(tmp_path / "sums.jsonl", questions(4))
    (tmp_path / "reward.py").write_text(
        "def score(data_source, solution_str, ground_truth, extra_info=None):\n    return float(solution_str)\n"
    )
    with pytest.raises(UserError, match="raised ValueError: could not convert string to float") as caught:
        run(source={"jsonl": "sums.jsonl"}, validation=1, answer="answer", reward={"function": "reward.py:score"})
    assert caught.value.code is ErrorCode.REWARD_INVALID and "reply ''" in str(caught.value)


def test_a_reward_with_other_arguments_is_told_which_verl_gives(tmp_path: Path, run: Run) -> None:
    write_lines(tmp_path / "sums.jsonl", questions(4))
    (tmp_path / "reward.py").write_text("def score(answer, truth):\n    return 1.0\n")
    with pytest.raises(UserError, match=r"its signature is \(answer, truth\)") as caught:
        run(source={"jsonl": "sums.jsonl"}, validation=1, answer="answer", reward={"function": "reward.py:score"})
    assert "data_source, solution_str, ground_truth, extra_info" in caught.value.remedy


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ("return 1.0", None),
        ("return {'score': 1, 'acc': 1.0}", None),
        ("return {'acc': 1.0}", "without 'score'"),
        ("return float('nan')", "not finite"),
        ("return None", "no number"),
        ("return 'good'", "no number"),
        ("raise KeyError(data_source)", "raised KeyError"),
    ],
)
def test_the_reward_is_tried_before_anything_is_trained(tmp_path: Path, run: Run, body: str, said: str | None) -> None:
    write_lines(tmp_path / "sums.jsonl", questions(4))
    (tmp_path / "reward.py").write_text(
        f"def score(data_source, solution_str, ground_truth, extra_info=None):\n    {body}\n"
    )
    fields = {"source": {"jsonl": "sums.jsonl"}, "validation": 1, "answer": "answer"}
    if said is None:
        assert run(reward={"function": "reward.py:score"}, **fields)["rows"]["train"] == 3
        return
    with pytest.raises(UserError, match=said) as caught:
        run(reward={"function": "reward.py:score"}, **fields)
    assert caught.value.code is ErrorCode.REWARD_INVALID and "train row 0" in str(caught.value)
