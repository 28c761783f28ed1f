from __future__ import annotations

import io
import re
from dataclasses import replace

from rich.console import Console

from verl_workflow.cli._facts import RunFacts, StageFacts
from verl_workflow.cli._view import LineView, LiveView, table

WAITING = StageFacts(name="evaluate", kind="evaluate", status="waiting")
TRAINING = StageFacts(
    name="train",
    kind="verl",
    status="running",
    attempt=2,
    phase="training",
    done=12,
    total=40,
    reward=0.4123,
    step_seconds=1.94,
    eta=54.3,
    elapsed=130.0,
)


def facts(*stages: StageFacts) -> RunFacts:
    return RunFacts(
        run_id="r1", pipeline="p", status="running", storage="file:///s", artifacts="/s", stages=stages, elapsed=141.0
    )


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def without_time(lines: list[str]) -> list[str]:
    return [re.sub(r"^\d\d:\d\d:\d\d ", "", line) for line in lines]


def test_lines_tell_each_change_once() -> None:
    written: list[str] = []
    view = LineView(written.append, Clock())
    prepared = StageFacts(name="prepare", kind="data", status="succeeded", attempt=1, elapsed=7.4, attempts=())
    for _ in range(3):
        view.show(facts(prepared, TRAINING, WAITING))
    view.show(
        facts(prepared, replace(TRAINING, status="retrying", error={"message": "the worker died\nstack"}), WAITING)
    )
    view.show(facts(prepared, replace(TRAINING, attempt=3), WAITING))
    assert without_time(written) == [
        "prepare: succeeded after 0:07",
        "train: running (attempt 2)",
        "train: step 12/40, reward 0.412, 1.9 s/step, ETA 0:54",
        "train: retrying (attempt 2): the worker died",
        "train: running (attempt 3)",
    ]


def test_progress_fills_at_most_one_line_in_ten_seconds() -> None:
    written: list[str] = []
    clock = Clock()
    view = LineView(written.append, clock)
    for tick in range(300):
        clock.now = tick / 10
        view.show(facts(replace(TRAINING, done=tick)))
    assert [line.split("step ")[1].split(",")[0] for line in written[1:]] == ["0/40", "100/40", "200/40"]


def test_a_reused_stage_says_whose_result_it_took() -> None:
    written: list[str] = []
    LineView(written.append, Clock()).show(
        facts(replace(TRAINING, status="succeeded", attempt=0, reused_from="monday"))
    )
    assert without_time(written) == ["train: re-used from monday"]


def test_the_table_shows_step_reward_rate_and_eta() -> None:
    out = io.StringIO()
    Console(file=out, width=120).print(table(facts(TRAINING, WAITING)))
    lines = out.getvalue().splitlines()
    assert lines[0].split() == ["run", "r1", "running", "2:21"]
    assert lines[1].split() == ["stage", "status", "attempt", "progress", "reward", "rate", "ETA", "elapsed"]
    bar = "━" * 6 + "─" * 14
    assert lines[2].split() == ["train", "running", "2", bar, "12/40", "0.412", "1.9", "s/step", "0:54", "2:10"]
    assert lines[3].split()[:3] == ["evaluate", "waiting", "-"]


def test_the_table_fits_a_terminal_of_eighty_columns() -> None:
    out = io.StringIO()
    Console(file=out, width=80).print(table(facts(TRAINING, WAITING)))
    assert all(len(line) <= 80 for line in out.getvalue().splitlines())
    assert "12/40" in out.getvalue()
    assert "0:54" in out.getvalue()


def test_the_live_view_redraws_and_restores_the_terminal() -> None:
    out = io.StringIO()
    view = LiveView(Console(file=out, force_terminal=True, width=120))
    view.show(facts(TRAINING))
    view.show(facts(replace(TRAINING, done=13)))
    view.close()
    drawn = out.getvalue()
    assert "12/40" in drawn
    assert "13/40" in drawn
    assert drawn.count("\x1b[?25l") == drawn.count("\x1b[?25h") == 1


def test_what_a_guard_warns_of_is_shown() -> None:
    warned = replace(TRAINING, warning="kl is 0.9, above 0.5, at step 12")
    written: list[str] = []
    LineView(written.append, Clock()).show(facts(warned))
    assert written[-1].endswith("ETA 0:54, warning: kl is 0.9, above 0.5, at step 12")
    console = Console(file=io.StringIO(), width=100)
    console.print(table(facts(warned)))
    assert isinstance(console.file, io.StringIO)
    assert "train: kl is 0.9, above 0.5, at step 12" in console.file.getvalue()
