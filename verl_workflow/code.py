"""The user's code: which files a pipeline needs, their digest, the copy that travels with a run, and loading from it.

A pipeline's code is the files that its functions name (``file.py:function``, and modules that lie beside the pipeline
file), what those import from the same folder, and the entries of ``code:``. Installed packages are not copied.
"""

from __future__ import annotations

import ast
import hashlib
import importlib
import importlib.util
import os
import secrets
import shutil
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from verl_workflow.artifacts import file_digest
from verl_workflow.errors import ErrorCode, UserError, VerlWorkflowError
from verl_workflow.paths import refused
from verl_workflow.spec import Pipeline
from verl_workflow.spec._functions import contained, is_file, module_file, parse

# Modules that came from a code folder, so that another folder's module of the same name is not taken for it.
_LOADED: dict[str, Path] = {}


@dataclass(frozen=True, kw_only=True)
class CodeManifest:
    """Attributes: files: sha256 by path relative to the pipeline's folder (forward slashes); digest: over them all."""

    files: Mapping[str, str]
    digest: str

    @classmethod
    def of(cls, files: Mapping[str, str]) -> CodeManifest:
        """The manifest of these files; the digest is SHA-256 over their sorted ``<path>\\0<sha256>`` lines."""
        ordered = dict(sorted(files.items()))
        lines = "".join(f"{path}\0{sha256}\n" for path, sha256 in ordered.items())
        return cls(files=ordered, digest=hashlib.sha256(lines.encode()).hexdigest())


def manifest(pipeline: Pipeline, base_dir: str | os.PathLike[str]) -> CodeManifest:
    """What the pipeline's code is now. Writes nothing and runs none of it.

    Raises:
        UserError: a file is missing, no Python, or lies outside of `base_dir` (links are followed to see that).
    """
    base = Path(base_dir)
    return CodeManifest.of({name: file_digest(base / name) for name in _files(pipeline, base)})


def snapshot(pipeline: Pipeline, base_dir: str | os.PathLike[str], target_dir: str | os.PathLike[str]) -> CodeManifest:
    """Copy the pipeline's code to `target_dir`, which appears complete or not at all.

    Links are copied as what they point to. A target that holds the same files already is left as it is.

    Raises:
        UserError: as `manifest`.
        VerlWorkflowError: FILE_EXISTS, the target holds something else; STORAGE, it cannot be made (`UserError` when
            it is no folder that can be written to).
        OSError: a source file cannot be read.
    """
    base, target = Path(base_dir), Path(target_dir)
    names = _files(pipeline, base)
    draft = target.parent / f".{target.name}.{secrets.token_hex(4)}.tmp"
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        draft.mkdir()
        for name in names:
            copy = draft / name
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(base / name, copy)
        # Digested from the copy: a file that is saved meanwhile is recorded as what travels.
        found = CodeManifest.of({name: file_digest(draft / name) for name in names})
        _publish(draft, target, found)
    except OSError as error:
        if _is_of_source(error, [base / name for name in names]):
            raise
        raise refused(target, error) from error
    finally:
        shutil.rmtree(draft, ignore_errors=True)
    return found


def _publish(draft: Path, target: Path, found: CodeManifest) -> None:
    try:
        draft.rename(target)
    except OSError as error:
        if not target.is_dir():
            raise
        if _recorded(target).digest != found.digest:
            raise VerlWorkflowError(
                ErrorCode.FILE_EXISTS,
                "the folder for the run's code holds other files",
                where=str(target),
                remedy="Choose another run id.",
            ) from error


def _is_of_source(error: OSError, sources: Iterable[Path]) -> bool:
    # One that breaks off half way names both files: it is the target that has no room.
    named = error.filename if error.filename2 is None else None
    return isinstance(error, shutil.SpecialFileError) or named in {str(path) for path in sources}


def changed(recorded: CodeManifest, base_dir: str | os.PathLike[str], entries: Iterable[str] = ()) -> list[str]:
    """How the folder differs from what was recorded, sorted: ``reward.py modified``, ``... missing``, ``... new``.

    New are files that recorded ones import by now, and those that have come into a folder of `entries`.

    Args:
        entries: the pipeline's ``code:``.
    """
    base = Path(base_dir)
    notes = {}
    present = []
    for name, sha256 in recorded.files.items():
        path = base / name
        if not path.is_file():
            notes[name] = "missing"
            continue
        present.append(name)
        if file_digest(path) != sha256:
            notes[name] = "modified"
    for name in _imported(base, (name for name in present if name.endswith(".py")), strict=False):
        if name not in recorded.files:
            notes[name] = "new"
    for entry in entries:
        # The files of one that is gone are among the missing.
        if not (base / entry).exists():
            continue
        try:
            notes |= {name: "new" for name in _entry(contained(base, entry), base) if name not in recorded.files}
        except UserError:
            # A link in it leads out of the project by now; a new run would be refused for it.
            notes[entry] = "modified"
    return [f"{name} {note}" for name, note in sorted(notes.items())]


def load_function(
    ref: str, code_dir: str | os.PathLike[str], *, error_code: ErrorCode = ErrorCode.SPEC_INVALID
) -> Callable[..., Any]:
    """The function behind ``file.py:function`` (in `code_dir`) or ``package.module:function`` (there or installed).

    `code_dir` is put first on ``sys.path`` and stays there, for imports that the function makes when it is called.

    Args:
        error_code: of what is raised; REWARD_INVALID for rewards.

    Raises:
        UserError: it cannot be imported or is not there; the cause is chained.
    """
    holder, _, name = ref.rpartition(":")
    base = Path(code_dir).absolute()
    try:
        if is_file(ref):
            module = load_module(contained(base, holder), base)
        else:
            _enter(base)
            module = importlib.import_module(holder)
            _remember(base)
    except UserError as error:
        if error.code is ErrorCode.FILE_MISSING:
            raise
        raise UserError(error_code, error.what, where=ref, value=error.value, remedy=error.remedy) from error
    except (Exception, SystemExit) as error:
        raise UserError(
            error_code,
            f"{holder} cannot be imported: {type(error).__name__}: {error}",
            where=ref,
            remedy=_import_remedy(error),
        ) from error
    function = getattr(module, name, None)
    if not callable(function):
        what = f"{holder} has no function {name}" if function is None else f"{name} in {holder} cannot be called"
        raise UserError(error_code, what, where=ref, value=function, remedy=f"Define `def {name}(...)` in it.")
    return function  # type: ignore[no-any-return]


def load_module(file: Path, code_dir: Path) -> ModuleType:
    """Run a Python file as a module with a name of its own; it may import what lies beside it and in `code_dir`.

    Raises:
        Exception: whatever the file raises.
    """
    path = file.absolute()
    _enter(Path(code_dir).absolute(), path.parent)
    name = f"verl_workflow_user_{path.stem}_{hashlib.sha256(str(path).encode()).hexdigest()[:12]}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None, "the name ends in .py"
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        # Not through the loader: it trusts a compiled copy when a file was saved twice within a second.
        exec(compile(path.read_bytes(), str(path), "exec"), vars(module))
    except BaseException:
        del sys.modules[name]
        raise
    finally:
        _remember(Path(code_dir).absolute(), path.parent)
    return module


def _enter(*folders: Path) -> None:
    """Put the folders first on the path, and forget modules of the same names that came from other code folders."""
    for folder in folders:
        text = str(folder)
        if text in sys.path:
            sys.path.remove(text)
        sys.path.insert(0, text)
    for name, folder in list(_LOADED.items()):
        if folder not in folders:
            del _LOADED[name]
            sys.modules.pop(name, None)
    importlib.invalidate_caches()


def _remember(*folders: Path) -> None:
    for name, module in list(sys.modules.items()):
        origin = getattr(module, "__file__", None)
        if not isinstance(origin, str) or name == "__main__" or name.startswith("verl_workflow"):
            continue
        for folder in folders:
            path = Path(origin)
            if path.is_relative_to(folder) and "site-packages" not in path.parts:
                # By the name alone it must be found in the folder: packages beside it are not the user's code.
                if module_file(folder, name) is not None:
                    _LOADED[name] = folder
                break


def _import_remedy(error: BaseException) -> str:
    if isinstance(error, ModuleNotFoundError) and error.name:
        return f"Install {error.name}, or put {error.name}.py beside the pipeline file (under `code` if need be)."
    return "Mend the file."


def _files(pipeline: Pipeline, base: Path) -> list[str]:
    roots = []
    for function in _functions(pipeline):
        holder = function.rpartition(":")[0]
        if is_file(function):
            roots.append(_relative(contained(base, holder), base))
        else:
            roots.extend(_module_files(base, base, holder))
    entries = [name for entry in pipeline.code for name in _entry(contained(base, entry), base)]
    python = [name for name in entries if name.endswith(".py")]
    return sorted({*entries, *_imported(base, [*roots, *python], strict=True)})


def _functions(pipeline: Pipeline) -> Iterator[str]:
    for stage in pipeline.stages:
        reward = getattr(stage, "reward", None)
        if reward is not None:
            yield reward.function
        function = getattr(stage, "function", None)
        if function is not None:
            yield function


def _entry(path: Path, base: Path) -> Iterator[str]:
    """Files of a `code` entry; in folders, hidden files and compiled Python are left out."""
    if path.is_file():
        yield _relative(path, base)
        return
    seen: set[Path] = set()
    for folder, subfolders, files in os.walk(path, followlinks=True):
        here = Path(folder)
        contained(base, _relative(here, base))
        if here.resolve() in seen:
            subfolders.clear()
            continue
        seen.add(here.resolve())
        subfolders[:] = sorted(name for name in subfolders if not name.startswith(".") and name != "__pycache__")
        for name in sorted(files):
            if not name.startswith(".") and not name.endswith((".pyc", ".pyo")):
                yield _relative(contained(base, _relative(here / name, base)), base)


def _imported(base: Path, roots: Iterable[str], *, strict: bool) -> list[str]:
    """The roots and all they import from `base`, directly or not."""
    found: set[str] = set()
    waiting = list(roots)
    while waiting:
        name = waiting.pop()
        if name in found:
            continue
        found.add(name)
        try:
            tree = parse(base / name)
        except UserError:
            if strict:
                raise
            continue
        for module, relative_to in _import_names(tree, base / name):
            for folder in (relative_to,) if relative_to is not None else ((base / name).parent, base):
                files = _module_files(base, folder, module)
                waiting.extend(files)
                if files:
                    break
    return sorted(found)


def _import_names(tree: ast.Module, path: Path) -> Iterator[tuple[str, Path | None]]:
    """Modules a file names in imports, each with the folder it is relative to, if it is."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, None) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            folder = path.parents[node.level - 1] if 0 < node.level <= len(path.parents) else None
            if node.module:
                yield node.module, folder
            for alias in node.names:
                # What is imported from a package may be a module of it.
                yield ".".join(filter(None, [node.module, alias.name])), folder


def _module_files(base: Path, folder: Path, module: str) -> list[str]:
    """The module's file below `folder` and the ``__init__.py`` of the packages it is in; nothing if there is none."""
    parts = module.split(".")
    found = []
    for length in range(1, len(parts) + 1):
        path = module_file(folder, ".".join(parts[:length]))
        if path is not None:
            found.append(_relative(contained(base, _relative(path, base)), base))
    return found


def _relative(path: Path, base: Path) -> str:
    return Path(os.path.relpath(path.absolute(), base.absolute())).as_posix()


def _recorded(folder: Path) -> CodeManifest:
    files = [path for path in folder.rglob("*") if path.is_file() and "__pycache__" not in path.parts]
    return CodeManifest.of({_relative(path, folder): file_digest(path) for path in files})
