from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from _stage_files import facts, rows
from hypothesis import given, settings
from hypothesis import strategies as st

from verl_workflow.trackers import Facts, Sender
from verl_workflow.trackers._sink import Point


class Remote:
    """A tracker's server: what it holds outlives senders."""

    def __init__(self, *, tells: bool = True) -> None:
        self.points: list[Point] = []
        self.down = False
        self.opened = 0
        self._tells = tells

    def open(self, tracker: Mapping[str, Any], facts: Facts, folder: Path) -> Remote:
        self._check()
        self.opened += 1
        return self

    def last_step(self) -> int | None:
        return max((point.step for point in self.points), default=0) if self._tells else None

    def send(self, points: Sequence[Point]) -> None:
        self._check()
        self.points += points

    def close(self) -> None:
        pass

    def _check(self) -> None:
        if self.down:
            raise ConnectionError("no route to the tracker")


def sender(stage_dir: Path, remote: Remote) -> Sender:
    return Sender(stage_dir, facts(stage_dir, {"kind": "fake"}), 0, open_with=remote.open)


def test_each_step_is_sent_once_in_order_with_its_numbers_alone(tmp_path: Path) -> None:
    remote = Remote()
    sending = sender(tmp_path, remote)
    assert sending.flush() == 0
    assert remote.opened == 0
    rows(tmp_path, 1, [1, 2])
    assert sending.flush() == 2
    rows(tmp_path, 1, [3])
    assert sending.flush() == 1
    assert [point.step for point in remote.points] == [1, 2, 3]
    assert remote.points[0].numbers == {"critic/score/mean": 10.01, "timing_s/step": 1.0}


def test_a_validation_and_a_training_at_one_step_are_one_point(tmp_path: Path) -> None:
    remote = Remote()
    rows(tmp_path, 1, [1])
    folder = tmp_path / "attempts/001/verl_metrics.jsonl"
    folder.write_text(folder.read_text() + '{"step": 1, "data": {"val-core/x/acc/mean@1": 0.5}}\n')
    sender(tmp_path, remote).flush()
    assert remote.points[0].numbers["val-core/x/acc/mean@1"] == 0.5
    assert remote.points[0].numbers["critic/score/mean"] == 10.01


def test_steps_that_are_trained_again_are_not_sent_again(tmp_path: Path) -> None:
    remote = Remote()
    rows(tmp_path, 1, [1, 2, 3, 4, 5])
    sender(tmp_path, remote).flush()
    rows(tmp_path, 2, [5, 6])
    sender(tmp_path, remote).flush()
    assert [(point.step, point.numbers["critic/score/mean"]) for point in remote.points][-2:] == [
        (5, 10.05),
        (6, 20.06),
    ]


def test_what_an_outage_left_is_sent_later(tmp_path: Path) -> None:
    remote = Remote()
    sending = sender(tmp_path, remote)
    rows(tmp_path, 1, [1, 2])
    sending.flush()
    remote.down = True
    rows(tmp_path, 1, [3, 4])
    with pytest.raises(ConnectionError):
        sending.flush()
    assert sending.sent == 2
    remote.down = False
    sending.drop()
    assert sending.flush() == 2
    assert [point.step for point in remote.points] == [1, 2, 3, 4]


def test_what_a_killed_sender_had_not_written_down_is_not_sent_twice(tmp_path: Path) -> None:
    remote = Remote()
    rows(tmp_path, 1, [1, 2, 3])
    sender(tmp_path, remote).flush()
    (tmp_path / "trackers/0-fake.json").write_text('{"sent": 1}')
    rows(tmp_path, 1, [4])
    sender(tmp_path, remote).flush()
    assert [point.step for point in remote.points] == [1, 2, 3, 4]


@pytest.mark.parametrize("text", ["", "{", "[]", '{"sent": "x"}'])
def test_a_cursor_that_cannot_be_read_asks_the_tracker(tmp_path: Path, text: str) -> None:
    remote = Remote()
    rows(tmp_path, 1, [1, 2])
    sender(tmp_path, remote).flush()
    (tmp_path / "trackers/0-fake.json").write_text(text)
    rows(tmp_path, 1, [3])
    sender(tmp_path, remote).flush()
    assert [point.step for point in remote.points] == [1, 2, 3]


def test_only_one_sends_at_a_time(tmp_path: Path) -> None:
    first, second = sender(tmp_path, Remote()), sender(tmp_path, Remote())
    with first.alone() as mine:
        assert mine
        with second.alone() as too:
            assert not too
    with second.alone() as mine:
        assert mine


@settings(deadline=None, max_examples=60)
@given(st.lists(st.sampled_from(["step", "resume", "flush", "down", "up", "crash"]), max_size=40))
def test_nothing_is_sent_twice_or_out_of_order_and_nothing_is_missing_in_the_end(
    tmp_path_factory: pytest.TempPathFactory, events: list[str]
) -> None:
    stage_dir = tmp_path_factory.mktemp("stage")
    remote = Remote()
    sending = sender(stage_dir, remote)
    attempt, step, highest = 1, 0, 0
    for event in [*events, "up", "crash", "flush"]:
        if event == "step":
            step += 1
            highest = max(highest, step)
            rows(stage_dir, attempt, [step])
        elif event == "resume":
            attempt, step = attempt + 1, max(0, step - 2)
        elif event in {"down", "up"}:
            remote.down = event == "down"
        elif event == "crash":
            sending = sender(stage_dir, remote)
        else:
            try:
                sending.flush()
            except ConnectionError:
                sending.drop()
    assert [point.step for point in remote.points] == list(range(1, highest + 1))
