"""`ray-workflow` over storages that hold workflows and pipelines' runs, without a cluster."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
from _one_step import make_workflow, run_workflow
from _runs import Invoke, Runs
from typer.testing import CliRunner

from verl_workflow.cli import app, ray_workflow_app
from verl_workflow.workflow import (
    RunStatus,
    StepContext,
    read_run,
)
from verl_workflow.workflow._definition import run_key

COMMANDS = ["list", "status", "resume", "resume-all", "fork", "cancel", "delete", "output", "metadata", "events send"]
COMMANDS += ["gc"]
PROGRAM = "from verl_workflow.cli import ray_workflow_main; ray_workflow_main()"


@pytest.fixture
def invoke() -> Invoke:
    return lambda *arguments: CliRunner().invoke(ray_workflow_app, list(arguments))


def document(shown: Any) -> Any:
    """The one JSON document on stdout."""
    assert shown.exception is None or isinstance(shown.exception, SystemExit), shown.exception
    return json.loads(shown.stdout)


def five() -> int:
    return 5


def pair() -> tuple[int, int]:
    return 1, 2


def broken() -> None:
    raise ValueError("no such luck")


def test_every_command_is_there_and_speaks_json() -> None:
    for command in COMMANDS:
        shown = CliRunner().invoke(ray_workflow_app, [*command.split(), "--help"], env={"COLUMNS": "200"})
        assert shown.exit_code == 0, command
        assert "--json" in shown.output, command
        assert "--storage" in shown.output, command


def test_start_up_imports_nothing_heavy() -> None:
    program = (
        "import sys\n"
        "from verl_workflow.cli import ray_workflow_main\n"
        "sys.argv = ['ray-workflow', '--help']\n"
        "try:\n    ray_workflow_main()\nexcept SystemExit:\n    pass\n"
        "heavy = {'ray', 'torch', 'pandas', 'pyarrow', 'obstore', 'numpy', 'fastapi'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_list_shows_workflows_and_pipelines_and_filters(runs: Runs, invoke: Invoke) -> None:
    runs.finish("nightly", {"a": lambda _: 1})
    run_workflow(runs.store, "good", five)
    run_workflow(runs.store, "bad", broken)
    (runs.path / "runs" / "torn").mkdir()
    (runs.path / "runs" / "torn" / "definition.json").write_text("{")
    told = {each["workflow_id"]: each for each in document(invoke("list", "--json"))["workflows"]}
    assert {name: (each["kind"], each["status"]) for name, each in told.items()} == {
        "nightly": ("pipeline", "SUCCESSFUL"),
        "good": ("workflow", "SUCCESSFUL"),
        "bad": ("workflow", "FAILED"),
        "torn": ("unknown", "DAMAGED"),
    }
    assert "no such luck" in told["bad"]["error"]["message"]
    assert "pickle" not in told["bad"]["error"]
    failed = document(invoke("list", "--json", "--status", "failed"))
    assert [each["workflow_id"] for each in failed["workflows"]] == ["bad"]
    lines = invoke("list")
    assert lines.exit_code == 0
    assert [line.split()[:3] for line in lines.stdout.splitlines() if line.startswith("good")] == [
        ["good", "workflow", "SUCCESSFUL"]
    ]
    assert "torn" in lines.stderr


@pytest.mark.parametrize(
    "arguments",
    [
        ["status", "nope"],
        ["resume", "nope"],
        ["cancel", "nope"],
        ["delete", "nope", "--yes"],
        ["output", "nope"],
        ["metadata", "nope"],
        ["fork", "nope", "step"],
        ["events", "send", "nope", "key", "1"],
        ["events", "send", "nope", "key", "no json"],
        ["events", "sned"],
        ["status", ".."],
        ["list", "--status", "SUCCESFUL"],
        ["resume", "x", "--on-code-change", "perhaps"],
        ["status"],
    ],
)
def test_a_mistake_exits_with_2_and_one_document_and_writes_nothing(
    tmp_path: Path, arguments: list[str], invoke: Invoke
) -> None:
    storage = tmp_path / "storage"
    shown = invoke(*arguments, "--json", "--storage", str(storage))
    assert shown.exit_code == 2
    assert document(shown)["error"]["code"] in {"run_unknown", "run_id_invalid", "usage_invalid"}
    assert "Traceback" not in shown.stderr
    assert not storage.exists()


def test_the_commands_for_pipelines_know_a_workflow_when_they_see_one(runs: Runs) -> None:
    run_workflow(runs.store, "good", five)
    shown = CliRunner().invoke(app, ["list", "--json"])
    (told,) = document(shown)["runs"]
    assert (told["run_id"], told["status"], told["pipeline"]) == ("good", "succeeded", "(workflow)")
    for command in ("status", "resume", "logs", "cancel", "plot"):
        shown = CliRunner().invoke(app, [command, "good", "--json"])
        assert shown.exit_code == 2, command
        assert "ray-workflow status good" in document(shown)["error"]["remedy"]


def test_status_tells_each_step_of_both_kinds(runs: Runs, invoke: Invoke) -> None:
    runs.finish("nightly", {"a": lambda _: 1, "b": lambda _: 2})
    run_workflow(runs.store, "bad", broken)
    nightly = document(invoke("status", "nightly", "--json"))
    assert (nightly["kind"], nightly["status"]) == ("pipeline", "SUCCESSFUL")
    assert [(each["task_id"], each["status"], each["attempts"]) for each in nightly["tasks"]] == [
        ("a", "succeeded", 1),
        ("b", "succeeded", 1),
    ]
    bad = document(invoke("status", "bad", "--json"))
    assert (bad["status"], bad["tasks"][0]["status"]) == ("FAILED", "failed")
    assert "no such luck" in bad["tasks"][0]["error"]["message"]
    shown = invoke("status", "bad")
    assert shown.stdout.startswith("workflow bad: FAILED")
    assert "only  failed in attempt 1" in shown.stdout


def test_output_prints_json_and_says_when_it_cannot(runs: Runs, invoke: Invoke) -> None:
    run_workflow(runs.store, "good", five)
    run_workflow(runs.store, "pair", pair)
    shown = invoke("output", "good")
    assert (shown.exit_code, shown.stdout, shown.stderr) == (0, "5\n", "")
    assert document(invoke("output", "good", "--task", "only", "--json"))["value"] == 5
    shown = invoke("output", "pair")
    assert (shown.exit_code, shown.stdout) == (0, "(1, 2)\n")
    assert "no plain JSON but a tuple" in shown.stderr
    told = document(invoke("output", "pair", "--json"))
    assert (told["is_json"], told["repr"]) == (False, "(1, 2)")


def in_itself() -> Any:
    found: dict[str, Any] = {}
    found["again"] = [found]
    return found


def twice() -> Any:
    row = {"n": 1}
    return [row, row]


def huge() -> int:
    return 10**5000


def test_output_of_what_json_cannot_write_is_shown_in_other_words(runs: Runs, invoke: Invoke) -> None:
    for name, function in (("circle", in_itself), ("huge", huge), ("twice", twice)):
        run_workflow(runs.store, name, function)
    assert document(invoke("output", "circle", "--json"))["repr"] == "{'again': [{...}]}"
    assert invoke("output", "circle").exit_code == 0
    assert "int" in document(invoke("output", "huge", "--json"))["repr"]
    assert invoke("output", "huge").exit_code == 0
    assert document(invoke("output", "twice", "--json"))["value"] == [{"n": 1}, {"n": 1}]


def test_output_of_a_pipeline_is_asked_for_by_stage(runs: Runs, invoke: Invoke) -> None:
    runs.finish("nightly", {"a": lambda _: {"rows": [1, 2]}})
    assert document(invoke("output", "nightly", "--task", "a"))["rows"] == [1, 2]
    shown = invoke("output", "nightly", "--json")
    assert shown.exit_code == 2
    assert "task_id" in document(shown)["error"]["what"]


def test_output_that_is_not_there_is_told(runs: Runs, invoke: Invoke) -> None:
    run_workflow(runs.store, "bad", broken)
    run_workflow(runs.store, "good", five)
    failed = invoke("output", "bad", "--json")
    assert failed.exit_code == 1
    assert "no such luck" in document(failed)["error"]["what"]
    unknown = invoke("output", "good", "--task", "nope", "--json")
    assert unknown.exit_code == 2
    assert "No such task_id 'nope'" in document(unknown)["error"]["what"]


def test_output_finds_the_users_classes_where_the_workflow_was_made(tmp_path: Path) -> None:
    code = tmp_path / "code"
    code.mkdir()
    (code / "shapes.py").write_text(
        "import dataclasses\n\n\n@dataclasses.dataclass\nclass Point:\n    x: int\n\n\n"
        "def point():\n    return Point(3)\n"
    )
    make = (
        "import sys\n"
        f"sys.path.insert(0, {str(Path(__file__).parent)!r})\n"
        "import shapes\n"
        "import _one_step as pieces\n"
        "from verl_workflow.storage import Store\n"
        "from verl_workflow.workflow import _graph, _client\n"
        "from dataclasses import replace\n"
        "real = pieces.graph_of\n"
        "pieces.graph_of = lambda *a, **k: replace(real(*a, **k), path=_client.python_path())\n"
        f"pieces.run_workflow(Store({str(tmp_path / 'storage')!r}), 'w', shapes.point)\n"
    )
    done = subprocess.run([sys.executable, "-c", make], cwd=code, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    arguments = ["output", "w", "--storage", str(tmp_path / "storage")]
    done = subprocess.run([sys.executable, "-c", PROGRAM, *arguments], cwd=tmp_path, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "Point(x=3)\n"), done.stderr


def test_metadata_of_workflow_and_step(runs: Runs, invoke: Invoke) -> None:
    run_workflow(runs.store, "good", five)
    told = document(invoke("metadata", "good", "--json"))
    assert (told["status"], told["user_metadata"]) == ("SUCCESSFUL", {"owner": "me"})
    step = document(invoke("metadata", "good", "--task", "only"))
    assert (step["task_id"], step["user_metadata"], len(step["attempts"])) == ("only", {"color": "red"}, 1)
    assert invoke("metadata", "good", "--task", "nope", "--json").exit_code == 2


def test_cancel_stops_what_runs_and_refuses_what_has_ended(runs: Runs, invoke: Invoke) -> None:
    begun, forever = threading.Event(), threading.Event()

    def waits(context: StepContext) -> Any:
        begun.set()
        forever.wait(60)

    runs.create("nightly", {"a": waits})
    thread = runs.drive_in_background("nightly", {"a": waits})
    assert begun.wait(60)
    assert document(invoke("cancel", "nightly", "--json"))["status"] == "CANCELED"
    forever.set()
    thread.join(60)
    make_workflow(runs.store, "waiting", five)
    assert invoke("cancel", "waiting").stdout == "workflow waiting: CANCELED\n"
    assert read_run(runs.store, "waiting").status is RunStatus.CANCELLED
    run_workflow(runs.store, "good", five)
    shown = invoke("cancel", "good", "--json")
    assert (shown.exit_code, document(shown)["error"]["code"]) == (2, "run_terminal")


def test_delete_asks_first_and_keeps_what_runs(runs: Runs, invoke: Invoke) -> None:
    run_workflow(runs.store, "good", five)
    for more in ([], ["--json"]):
        shown = invoke("delete", "good", *more)
        assert shown.exit_code == 2
        assert "--yes" in shown.stderr
    assert read_run(runs.store, "good").status is RunStatus.SUCCEEDED
    assert document(invoke("delete", "good", "--yes", "--json"))["deleted"] is True
    assert runs.store.list("runs/good") == []
    make_workflow(runs.store, "waiting", five)
    shown = invoke("delete", "waiting", "--yes", "--json")
    assert (shown.exit_code, document(shown)["error"]["code"]) == (2, "run_owned")


def test_what_is_damaged_can_be_deleted(runs: Runs, invoke: Invoke) -> None:
    run_workflow(runs.store, "good", five)
    (runs.path / "runs" / "good" / "definition.json").write_text("{")
    assert invoke("status", "good", "--json").exit_code == 1
    assert invoke("delete", "good", "--yes").exit_code == 0
    assert runs.store.list("runs/good") == []


def test_an_event_is_sent_once(runs: Runs, invoke: Invoke) -> None:
    make_workflow(runs.store, "waiting", five)
    for _ in range(2):
        shown = invoke("events", "send", "waiting", "approved", '{"by": "me"}', "--json")
        assert (shown.exit_code, document(shown)["stored"]) == (0, True)
    stored = json.loads(runs.store.get(f"{run_key(runs.store, 'waiting').folder}/events/approved.json") or b"")
    assert stored == {"event_key": "approved", "payload": {"by": "me"}}
    shown = invoke("events", "send", "waiting", "approved", "2", "--json")
    assert (shown.exit_code, document(shown)["error"]["code"]) == (2, "event_conflict")
    assert invoke("events", "send", "waiting", "bare").exit_code == 0
    assert invoke("events", "send", "waiting", "", "1", "--json").exit_code == 2


def test_gc_tells_what_it_removed(runs: Runs, invoke: Invoke) -> None:
    run_workflow(runs.store, "good", five)
    for key in runs.store.list(f"{run_key(runs.store, 'good').folder}/journal"):
        entry = json.loads(runs.store.get(key) or b"")
        runs.store.put(key, json.dumps({**entry, "time": entry["time"] - 4000}).encode())
    entries = len(runs.store.list(f"{run_key(runs.store, 'good').folder}/journal"))
    (runs.path / "runs" / "torn").mkdir()
    (runs.path / "runs" / "torn" / "definition.json").write_text("{")
    shown = invoke("gc", "--json")
    removed = document(shown)["removed"]
    assert (shown.exit_code, removed["entries"], removed["damaged"]) == (1, entries - 1, ["torn"])
    assert removed["bytes"] > 0
    assert invoke("output", "good").stdout == "5\n"
    shown = invoke("gc", "good")
    assert (shown.exit_code, shown.stdout.startswith("1 runs: removed 0 bytes")) == (0, True)
    assert invoke("gc", "nope", "--json").exit_code == 2


def test_what_cannot_be_forked_is_told_without_a_cluster(runs: Runs, invoke: Invoke) -> None:
    run_workflow(runs.store, "good", five)
    runs.finish("nightly", {"a": lambda _: 1})
    before = runs.store.list("")
    for arguments, word in (
        (("good", "nope"), "No such task_id 'nope'"),
        (("good", "only", "--new-id", "nightly"), "exists already"),
        (("good", "only", "--new-id", ".."), "folder"),
        (("nightly", "a"), "cannot be forked"),
    ):
        shown = invoke("fork", *arguments, "--json")
        assert shown.exit_code == 2
        assert word in document(shown)["error"]["what"]
    assert runs.store.list("") == before


def test_resume_needs_no_cluster_to_say_no(runs: Runs, invoke: Invoke) -> None:
    run_workflow(runs.store, "good", five)
    shown = invoke("resume", "good", "--json")
    assert (shown.exit_code, document(shown)["status"]) == (0, "SUCCESSFUL")
    make_workflow(runs.store, "waiting", five)
    shown = invoke("resume", "waiting", "--json")
    assert (shown.exit_code, document(shown)["error"]["code"]) == (2, "run_owned")
    invoke("cancel", "waiting")
    shown = invoke("resume", "waiting", "--json")
    assert (shown.exit_code, document(shown)["error"]["code"]) == (2, "run_terminal")
    runs.finish("nightly", {"a": lambda _: 1})
    shown = invoke("resume", "nightly", "--on-code-change", "rerun", "--json")
    assert (shown.exit_code, document(shown)["error"]["where"]) == (2, "--on-code-change")
    # As `verl-workflow resume` tells it.
    assert document(invoke("resume", "nightly", "--json"))["pipeline"] == "demo"
    assert invoke("resume-all", "--json").exit_code == 0
