from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest
from typer.testing import CliRunner

from verl_workflow.cli import app

CLI = Path(sys.executable).with_name("verl-workflow")
MAIN = "from verl_workflow.cli import main; main()"
COMMANDS = ["init", "validate", "plan", "schema", "run", "resume", "status", "list", "logs", "plot", "cancel", "models"]


def test_help_names_every_command() -> None:
    shown = CliRunner().invoke(app, ["--help"])
    assert shown.exit_code == 0
    first_words = re.findall(r"^\W*(\w+)", shown.output, re.MULTILINE)
    assert [word for word in first_words if word in COMMANDS] == COMMANDS


def test_every_command_speaks_json() -> None:
    for command in COMMANDS:
        shown = CliRunner().invoke(app, [command, "--help"], env={"COLUMNS": "200"})
        assert shown.exit_code == 0
        assert "--json" in shown.output, command


def test_start_up_imports_nothing_heavy() -> None:
    program = (
        "import sys\n"
        "from verl_workflow.cli import main\n"
        "sys.argv = ['verl-workflow', '--help']\n"
        "try:\n    main()\nexcept SystemExit:\n    pass\n"
        "heavy = {'ray', 'torch', 'verl', 'pandas', 'transformers', 'pyarrow', 'obstore', 'numpy'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_the_console_script_tells_its_version() -> None:
    done = subprocess.run([CLI, "--version"], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, f"verl-workflow {version('verl-workflow')}\n")


def test_a_usage_error_exits_with_2_and_no_traceback() -> None:
    done = subprocess.run([CLI, "run", "x.yaml", "--no-such-option"], capture_output=True, text=True)
    assert done.returncode == 2
    assert "No such option" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("arguments", "what", "where"),
    [
        (["run", "--json"], "Missing argument", "run"),
        (["status", "--json", "--nope"], "No such option", "status"),
        (["nope", "--json"], "No such command", ""),
    ],
)
def test_a_usage_error_is_one_json_document_too(arguments: list[str], what: str, where: str) -> None:
    done = subprocess.run([sys.executable, "-c", MAIN, *arguments], capture_output=True, text=True)
    assert done.returncode == 2
    error = json.loads(done.stdout)["error"]
    assert error["code"] == "usage_invalid"
    assert error["what"].startswith(what)
    assert error["where"].endswith(where)
    assert "Usage:" in done.stderr
    quiet = [each for each in arguments if each != "--json"]
    assert CliRunner().invoke(app, quiet).stdout == ""


@pytest.mark.parametrize("arguments", [["schema"], ["--help"], ["--version"], ["run", "--json"]])
@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_a_full_device_is_told_in_one_line(arguments: list[str], unbuffered: str) -> None:
    environment = {**os.environ, "PYTHONUNBUFFERED": unbuffered}
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            [sys.executable, "-c", MAIN, *arguments], stdout=full, stderr=subprocess.PIPE, text=True, env=environment
        )
    assert done.returncode == 1
    assert done.stderr == "error: cannot write to standard output: No space left on device\n"


def test_a_closed_pipe_ends_silently() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run([sys.executable, "-c", MAIN, "schema"], stdout=writer, stderr=subprocess.PIPE, text=True)
    os.close(writer)
    assert (done.returncode, done.stderr) == (1, "")


def test_arguments_that_are_no_text_are_told_in_json(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", MAIN, "list", "--json", "--storage", os.fsdecode(b"a\xffb")], capture_output=True
    )
    assert done.returncode == 2
    assert "a path holds no NUL" in json.loads(done.stdout)["error"]["what"]


def test_schema_is_json_schema() -> None:
    import jsonschema

    shown = CliRunner().invoke(app, ["schema"])
    assert shown.exit_code == 0
    jsonschema.validators.validator_for(json.loads(shown.stdout)).check_schema(json.loads(shown.stdout))
