"""Pickles that are loaded in another process than the one that has made them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

SCRIPT = """
import dataclasses, enum, sys
from pathlib import Path
from verl_workflow.storage import Store
from verl_workflow.workflow._pickling import dumps, loads

@dataclasses.dataclass
class Trip:
    days: int

class Color(enum.Enum):
    RED = 1

class Lost(Exception):
    pass

class Longer(Trip):
    def shown(self):
        return type(self) is Longer

store, file = Store(sys.argv[1]), Path(sys.argv[2])
if not file.exists():
    file.write_bytes(dumps([Trip(3), Color.RED, Lost("x"), Longer(9), Trip], store, "objects"))
trip, color, lost, longer, kind = loads(file.read_bytes(), store)
known = isinstance(longer, Trip), isinstance(lost, Lost), kind is Trip
print(trip == Trip(3), color is Color.RED, longer.shown(), *known)
"""

OTHER = """
import sys
from pathlib import Path
from verl_workflow.storage import Store
from verl_workflow.workflow._pickling import loads

trip, color, lost, longer, kind = loads(Path(sys.argv[2]).read_bytes(), Store(sys.argv[1]))
print(trip.days, color.name, lost, isinstance(longer, kind))
"""

REFERENCE = """
import io, pickle, sys
import ray
from verl_workflow.errors import VerlWorkflowError
from verl_workflow.storage import Store
from verl_workflow.workflow._pickling import keep, loads

store = Store(sys.argv[1])
kept = keep(pickle.dumps(5), store, "objects")

class Pickler(pickle.Pickler):
    def persistent_id(self, thing):
        return ("object", kept.key, kept.sha256) if thing == "here" else None

stream = io.BytesIO()
Pickler(stream).dump(["here"])
try:
    loads(stream.getvalue(), store)
except VerlWorkflowError as error:
    print(error.code.value, error.remedy, ray.is_initialized())
"""


def said(program: str, tmp_path: Path) -> str:
    command = [sys.executable, "-c", program, str(tmp_path / "storage"), str(tmp_path / "pickle")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_in_another_run_of_a_script_values_are_of_its_own_classes(tmp_path: Path) -> None:
    assert said(SCRIPT, tmp_path) == said(SCRIPT, tmp_path) == " ".join(["True"] * 6)


def test_where_there_are_no_such_classes_the_pickles_own_stand_in(tmp_path: Path) -> None:
    said(SCRIPT, tmp_path)
    assert said(OTHER, tmp_path) == "3 RED x True"


def test_object_references_do_not_start_a_cluster(tmp_path: Path) -> None:
    assert said(REFERENCE, tmp_path) == "cluster_unreachable Call ray.init() first. False"
