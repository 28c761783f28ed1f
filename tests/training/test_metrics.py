from __future__ import annotations

import json
from pathlib import Path

from verl_workflow.training._metrics import MetricsFile, Row, merge, non_finite, rewards, step_seconds, write


def line(step: int, **data: object) -> bytes:
    return json.dumps({"step": step, "data": {key.replace("__", "/"): value for key, value in data.items()}}).encode()


def trained(step: int, reward: float = 0.5, seconds: float = 2.0) -> bytes:
    return line(step, critic__score__mean=reward, timing_s__step=seconds) + b"\n"


def test_a_torn_last_line_is_read_when_it_is_whole(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    file = MetricsFile(path)
    assert file.read() == []
    path.write_bytes(trained(1) + trained(2)[:-9])
    assert [row.step for row in file.read()] == [1]
    assert file.read() == []
    path.write_bytes(trained(1) + trained(2) + trained(3))
    assert [row.step for row in file.read()] == [2, 3]


def test_a_line_that_is_no_json_is_passed_over(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(trained(1) + b'{"step": 2, "da\n' + trained(3))
    assert [row.step for row in MetricsFile(path).read()] == [1, 3]


def test_the_later_attempt_wins_where_attempts_overlap(tmp_path: Path) -> None:
    first, second = tmp_path / "1", tmp_path / "2"
    first.write_bytes(trained(1, 0.1) + trained(2, 0.2) + trained(3, 0.3))
    second.write_bytes(trained(3, 0.35) + trained(4, 0.4))
    rows = merge([first, tmp_path / "never-started", second])
    assert [(row.step, row.number("critic/score/mean")) for row in rows] == [(1, 0.1), (2, 0.2), (3, 0.35), (4, 0.4)]
    assert rewards(rows) == {"first": 0.1, "last": 0.4, "best": 0.4}
    write(rows, tmp_path / "merged")
    assert merge([tmp_path / "merged"]) == rows


def test_rewards_of_nothing() -> None:
    assert rewards([]) == {"first": None, "last": None, "best": None}
    assert step_seconds([]) is None


def test_non_finite_losses_are_named() -> None:
    row = Row(step=1, data={"actor/grad_norm": None, "actor/pg_loss": 0.1, "perf/mfu": None})
    assert non_finite(row) == ["actor/grad_norm"]
