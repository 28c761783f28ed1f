from __future__ import annotations

import json
import threading
from typing import Any

from _runs import Invoke, Runs

from verl_workflow.errors import ErrorCode, UserError, VerlWorkflowError
from verl_workflow.workflow import StepContext, StepStatus, read_run
from verl_workflow.workflow._definition import run_key

DATA = {"rows": {"train": 80, "validation": 20, "rejected": 0}, "rejected": None}
TRAINED = {"step": 4, "reward": {"first": 0.1, "last": 0.9, "best": 0.95}}


def fails(context: StepContext) -> Any:
    raise VerlWorkflowError(ErrorCode.TRAINING_FAILED, "the GPU fell off", where="train", remedy="Put it back.")


def test_a_finished_run_shows_each_result(runs: Runs, invoke: Invoke) -> None:
    runs.finish("r1", {"prepare": lambda _: DATA, "train": lambda _: TRAINED})
    shown = invoke("status", "r1")
    assert shown.exit_code == 0
    lines = shown.stdout.splitlines()
    assert lines[0].startswith("run r1: succeeded after 0:0")
    assert lines[1].startswith("  prepare   80 rows to train on, 20 held out, 0 rejected (0:0")
    assert lines[2].startswith("  train     reached step 4, reward 0.100 -> 0.900 (best 0.950) (0:0")
    assert lines[3:] == [f"  storage:  {runs.path}", f"  files:    {runs.path}/runs/r1"]


def test_a_failed_run_tells_why_and_how_to_go_on(runs: Runs, invoke: Invoke) -> None:
    runs.finish("r1", {"prepare": lambda _: DATA, "train": fails, "evaluate": lambda _: None})
    shown = invoke("status", "r1")
    assert shown.exit_code == 0
    assert "train     failed in attempt 1" in shown.stdout
    assert "evaluate  not started" in shown.stdout
    assert shown.stdout.splitlines()[-4:] == [
        "error: train: the GPU fell off. Put it back.",
        f"log: verl-workflow logs r1 --stage train --storage {runs.path}",
        f"why, and what it cost: verl-workflow explain r1 --storage {runs.path}",
        f"resume with: verl-workflow resume r1 --storage {runs.path}",
    ]


def test_an_error_nobody_foresaw_shows_the_way_to_its_cause(runs: Runs, invoke: Invoke) -> None:
    runs.finish("r1", {"custom": lambda _: 1 // 0})
    shown = invoke("status", "r1")
    assert "error: custom: ZeroDivisionError: integer division or modulo by zero" in shown.stdout
    assert f'File "{__file__}"' in shown.stdout


def test_status_as_json_is_one_document(runs: Runs, invoke: Invoke) -> None:
    runs.finish("r1", {"prepare": lambda _: DATA, "train": fails})
    found = json.loads(invoke("status", "r1", "--json").stdout)
    assert (found["run_id"], found["pipeline"], found["status"]) == ("r1", "demo", "failed")
    assert found["error"]["code"] == "training_failed"
    prepare, train = found["stages"]
    assert (prepare["stage"], prepare["kind"], prepare["status"]) == ("prepare", "data", "succeeded")
    assert prepare["value"] == DATA
    assert (train["status"], train["attempt"], train["error"]["message"]) == (
        "failed",
        1,
        "train: the GPU fell off. Put it back.",
    )


def test_a_running_run_shows_progress_and_its_driver(runs: Runs, invoke: Invoke) -> None:
    reported, enough = threading.Event(), threading.Event()

    def trains(context: StepContext) -> Any:
        context.report({"phase": "training", "step": 3, "total": 12, "reward": 0.25, "step_seconds": 2.0})
        reported.set()
        assert enough.wait(60)
        return TRAINED

    runs.create("r1", {"train": trains})
    thread = runs.drive_in_background("r1", {"train": trains})
    assert reported.wait(60)
    shown = invoke("status", "r1")
    progress = json.loads(invoke("status", "r1", "--json").stdout)["stages"][0]["progress"]
    enough.set()
    thread.join(60)
    assert shown.exit_code == 0
    row = next(line for line in shown.stdout.splitlines() if line.startswith("train"))
    assert row.split()[:3] == ["train", "running", "1"]
    assert "3/12" in row
    assert "0.250" in row
    assert "driver: process" in shown.stdout
    assert "resume with" not in shown.stdout
    assert (progress["done"], progress["total"], progress["reward"]) == (3, 12, 0.25)


def test_a_run_that_nobody_drives_says_how_to_resume_it(runs: Runs, invoke: Invoke) -> None:
    runs.finish("r1", {"train": fails})
    # Its end was never written: the driver died before.
    last = runs.store.list(f"{run_key(runs.store, 'r1').folder}/journal")[-1]
    entry = json.loads(runs.store.get(last) or b"")
    assert entry["events"].pop()["kind"] == "run_failed"
    runs.store.put(last, json.dumps(entry).encode())
    assert read_run(runs.store, "r1").steps["train"].status is StepStatus.FAILED
    shown = invoke("status", "r1")
    assert shown.stdout.splitlines()[0].split()[2] == "resumable"
    assert "driver: gone" in shown.stdout
    assert f"resume with: verl-workflow resume r1 --storage {runs.path}" in shown.stdout


def test_an_unknown_run_exits_with_2_and_a_suggestion_and_writes_nothing(runs: Runs, invoke: Invoke) -> None:
    shown = invoke("status", "r1")
    assert (shown.exit_code, shown.stdout) == (2, "")
    assert not runs.path.exists()
    runs.finish("nightly", {"a": lambda _: 1})
    shown = invoke("status", "nightyl", "--json")
    assert shown.exit_code == 2
    assert "Did you mean nightly" in shown.stderr
    assert json.loads(shown.stdout)["error"]["code"] == "run_unknown"


def test_a_run_id_cannot_leave_the_storage(runs: Runs, invoke: Invoke) -> None:
    for verb in ("status", "logs", "cancel", "resume"):
        shown = invoke(verb, "../x")
        assert shown.exit_code == 2, verb
        assert shown.stderr.startswith("error: "), verb
        assert "Traceback" not in shown.output
    assert list(runs.folder.iterdir()) == []


def test_list_shows_the_newest_first_and_no_damaged_run_hides_another(runs: Runs, invoke: Invoke) -> None:
    runs.finish("zebra", {"a": lambda _: 1, "b": lambda _: 2})
    runs.finish("apple", {"a": fails})
    shown = invoke("list")
    assert shown.exit_code == 0
    rows = [line.split() for line in shown.stdout.splitlines()]
    assert [row[0] for row in rows] == ["run", "apple", "zebra"]
    assert rows[1][1:4] == ["demo", "failed", "0/1"]
    assert rows[2][1:4] == ["demo", "succeeded", "2/2"]

    runs.store.put(f"{run_key(runs.store, 'apple').folder}/journal/000000000000.json", b"{")
    shown = invoke("list", "--json")
    assert {run["run_id"]: run["status"] for run in json.loads(shown.stdout)["runs"]} == {
        "zebra": "succeeded",
        "apple": "damaged",
    }
    assert "error: apple:" in invoke("list").stderr


def test_an_empty_storage_lists_nothing_and_is_not_created(runs: Runs, invoke: Invoke) -> None:
    shown = invoke("list", "--json")
    assert (shown.exit_code, json.loads(shown.stdout)["runs"]) == (0, [])
    assert not runs.path.exists()


def refuses(context: StepContext) -> Any:
    raise UserError(ErrorCode.GATE_INVALID, "there is no candidate.scor", where="promote.gate")


def test_a_mistake_in_the_pipeline_is_not_to_be_resumed(runs: Runs, invoke: Invoke) -> None:
    """A resumed run has the pipeline it was started with, and would meet the same mistake again."""
    runs.finish("r1", {"promote": refuses})
    shown = invoke("status", "r1")
    assert shown.stdout.splitlines()[-1] == (
        "mend the pipeline or its code and start a new run: finished stages are re-used"
    )
    assert "resume with" not in shown.stdout
