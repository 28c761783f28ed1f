from __future__ import annotations

import subprocess
import sys
import textwrap

SCRIPT = """
    import importlib, pkgutil, sys
    import verl_airflow
    names = [name for _, name, _ in pkgutil.walk_packages(verl_airflow.__path__, "verl_airflow.")]
    assert len(names) > 10, names
    for name in names:
        importlib.import_module(name)
    heavy = {"ray", "torch", "verl", "transformers", "pandas", "pyarrow", "kubernetes"} & set(sys.modules)
    assert not heavy, heavy
"""
LIGHT = """
    import sys
    import airflow.sdk
    import airflow.triggers.base
    import httpx
    import tenacity
    import verl_airflow.operators
    import verl_airflow.sensors
    names = ("verl_workflow.spec", "verl_workflow.workflow", "obstore")
    heavy = {name for name in sys.modules if name.startswith(names)}
    assert not heavy, heavy
"""


def run(script: str) -> None:
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(script)], capture_output=True, text=True, timeout=180)
    assert done.returncode == 0, done.stderr


def test_nothing_of_the_cluster_s_is_imported() -> None:
    run(SCRIPT)


def test_a_dag_file_that_names_the_operators_imports_nothing_that_takes_long() -> None:
    run(LIGHT)
