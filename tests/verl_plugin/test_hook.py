"""Work that waits for an import, in fresh interpreters, as an import cannot be undone."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import verl_workflow


def python(code: str, path: Path) -> subprocess.CompletedProcess[str]:
    # The hook belongs to the plugin's package, whose import brings verl with it: load the one file instead.
    hook = Path(verl_workflow.__file__).parent / "verl_plugin" / "_hook.py"
    prelude = (
        "import importlib.util, sys\n"
        f"sys.path.insert(0, {str(path)!r})\n"
        f"spec = importlib.util.spec_from_file_location('hook', {str(hook)!r})\n"
        "hook = importlib.util.module_from_spec(spec)\n"
        "spec.loader.exec_module(hook)\n"
        "after_import = hook.after_import\n"
    )
    return subprocess.run([sys.executable, "-c", prelude + code], capture_output=True, text=True)


def package(path: Path) -> None:
    (path / "parcel").mkdir()
    (path / "parcel" / "__init__.py").write_text("from parcel.inner import value\n")
    (path / "parcel" / "inner.py").write_text("value = 7\n")


def test_the_action_runs_once_after_the_first_import_and_leaves_nothing_behind(tmp_path: Path) -> None:
    package(tmp_path)
    out = python(
        "before = list(sys.meta_path)\n"
        "def act():\n"
        "    import parcel.inner\n"
        "    print('ran', parcel.inner.value)\n"
        "after_import('parcel', act)\n"
        "import parcel.inner\n"
        "import parcel, inspect, importlib\n"
        "print(sys.meta_path == before, type(parcel.__loader__).__name__, type(parcel.__spec__.loader).__name__)\n"
        "print(inspect.getsource(parcel).strip())\n"
        "importlib.reload(parcel)\n",
        tmp_path,
    )
    assert out.stderr == ""
    assert out.stdout.splitlines() == [
        "ran 7",
        "True SourceFileLoader SourceFileLoader",
        "from parcel.inner import value",
    ]


def test_the_action_runs_at_once_when_the_module_is_there(tmp_path: Path) -> None:
    package(tmp_path)
    out = python("import parcel\nafter_import('parcel', lambda: print('ran'))\nprint('then')", tmp_path)
    assert out.stdout.split() == ["ran", "then"]


def test_several_actions_wait_for_one_module(tmp_path: Path) -> None:
    package(tmp_path)
    out = python(
        "after_import('parcel', lambda: print('a'))\nafter_import('parcel', lambda: print('b'))\nimport parcel",
        tmp_path,
    )
    assert sorted(out.stdout.split()) == ["a", "b"]


def test_a_failing_action_is_logged_and_fails_the_import(tmp_path: Path) -> None:
    package(tmp_path)
    out = python("after_import('parcel', lambda: 1 / 0)\nimport parcel", tmp_path)
    assert out.returncode == 1
    assert "what was to happen after the import of parcel failed" in out.stderr
    assert out.stderr.count("ZeroDivisionError") == 2


def test_an_import_that_failed_may_be_tried_again(tmp_path: Path) -> None:
    (tmp_path / "shaky.py").write_text("import sys\nif not hasattr(sys, 'steady'): raise ImportError('not yet')\n")
    out = python(
        "after_import('shaky', lambda: print('ran'))\n"
        "try:\n    import shaky\nexcept ImportError as error:\n    print(error)\n"
        "sys.steady = True\nimport shaky\n",
        tmp_path,
    )
    assert out.stdout.splitlines() == ["not yet", "ran"]


def test_a_module_that_does_not_exist_stays_missing(tmp_path: Path) -> None:
    out = python("after_import('no_such_parcel', print)\nimport no_such_parcel", tmp_path)
    assert "No module named 'no_such_parcel'" in out.stderr
