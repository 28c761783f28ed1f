from __future__ import annotations

import json
import re
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

from typer.testing import CliRunner

from verl_workflow.cli import app

CLI = Path(sys.executable).with_name("verl-workflow")
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


def test_schema_is_json_schema() -> None:
    import jsonschema

    shown = CliRunner().invoke(app, ["schema"])
    assert shown.exit_code == 0
    jsonschema.validators.validator_for(json.loads(shown.stdout)).check_schema(json.loads(shown.stdout))
