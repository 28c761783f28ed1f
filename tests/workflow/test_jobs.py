"""Several scripts on one cluster, with one storage."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
from _flows import kill_driver, until

from verl_workflow import workflow

SCRIPT = """
import sys
import ray
from verl_workflow import workflow
import task

address, storage, workflow_id = sys.argv[1:]
environment = {} if workflow_id == "plain" else {"env_vars": {"OF_JOB": workflow_id}}
ray.init(address=address, log_to_driver=False, runtime_env=environment)
workflow.init(storage=storage)
if hasattr(task, "Listener"):
    flow = workflow.wait_for_event(task.Listener)
elif hasattr(task, "flow"):
    flow = task.flow()
else:
    flow = ray.remote(task.answer).bind()
print(workflow.run(flow, workflow_id=workflow_id))
"""


@pytest.fixture
def script(ray_cluster: Any, tmp_path: Path) -> Any:
    """Runs a script of its own process and folder, and gives what it prints last."""

    def run(folder: Path, source: str, workflow_id: str) -> str:
        folder.mkdir(exist_ok=True)
        (folder / "task.py").write_text(source)
        (folder / "main.py").write_text(SCRIPT)
        address = ray_cluster.get_runtime_context().gcs_address
        environment = {**os.environ, "PYTHONDONTWRITEBYTECODE": "1"}
        done = subprocess.run(
            [sys.executable, "main.py", address, str(tmp_path / "storage"), workflow_id],
            cwd=folder,
            env=environment,
            capture_output=True,
            text=True,
            timeout=300,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout.splitlines()[-1]

    return run


def test_a_script_runs_the_code_that_it_sees_and_no_older_one(script: Any, tmp_path: Path) -> None:
    assert script(tmp_path / "a", "def answer(): return 'first'", "one") == "first"
    assert script(tmp_path / "a", "def answer(): return 'second'", "two") == "second"


def test_modules_beside_another_script_are_found_though_the_first_one_started_the_host(
    script: Any, tmp_path: Path
) -> None:
    assert script(tmp_path / "a", "def answer(): return 'from a'", "one") == "from a"
    assert script(tmp_path / "b", "def answer(): return 'from b'", "two") == "from b"


def test_steps_run_in_the_runtime_environment_of_their_own_job(script: Any, tmp_path: Path) -> None:
    source = "import os\n\ndef answer(): return os.environ['OF_JOB']"
    assert script(tmp_path / "a", source, "one") == "one"
    assert script(tmp_path / "a", source, "two") == "two"


def test_the_environment_of_the_job_that_started_the_host_is_no_other_jobs(script: Any, tmp_path: Path) -> None:
    source = "import os\n\ndef answer(): return os.environ.get('OF_JOB')"
    assert script(tmp_path / "a", source, "one") == "one"
    assert script(tmp_path / "a", source, "plain") == "None"


IN_TWO_STEPS = """
import os
import ray
from verl_workflow import workflow

@ray.remote
def before():
    return os.environ.get("OF_JOB")

@ray.remote
def after(first, event):
    return first, os.environ.get("OF_JOB")

def flow():
    first = before.options(**workflow.options(task_id="before")).bind()
    return after.bind(first, workflow.wait_for_event(workflow.StorageListener, "go"))
"""


@pytest.mark.fault
def test_a_workflow_goes_on_in_the_environment_of_its_job_when_the_host_is_rebuilt(script: Any, tmp_path: Path) -> None:
    assert script(tmp_path / "a", "def answer(): return 1", "one") == "1"
    printed: list[str] = []
    other = threading.Thread(target=lambda: printed.append(script(tmp_path / "b", IN_TWO_STEPS, "two")))
    other.start()
    workflow.init(storage=str(tmp_path / "storage"))
    until(lambda: [name for name, _ in workflow.list_all() if name == "two"], "second workflow")
    assert workflow.get_output("two", task_id="before") == "two"
    first = kill_driver("two")

    def rebuilt() -> bool:
        owner = workflow.read_run(workflow._session.storage(), "two").owner
        return owner is not None and owner["pid"] != first

    until(rebuilt, "rebuilt host")
    workflow.send_event("two", "go", 1)
    other.join(120)
    assert printed == ["('two', 'two')"]


LISTENER = """
import os
from verl_workflow import workflow

class Listener(workflow.EventListener):
    async def poll_for_event(self):
        return "first", os.environ["OF_JOB"]
"""


def test_listeners_run_in_the_environment_of_their_own_job_and_as_they_are_now(script: Any, tmp_path: Path) -> None:
    assert script(tmp_path / "a", LISTENER, "one") == "('first', 'one')"
    assert script(tmp_path / "a", LISTENER.replace("first", "second"), "two") == "('second', 'two')"
