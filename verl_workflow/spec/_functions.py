"""What can be known of user code without running it: where a function's file is and whether it defines the function."""

from __future__ import annotations

import ast
import importlib.util
from collections.abc import Collection, Iterator
from pathlib import Path

from verl_workflow.errors import ErrorCode, UserError
from verl_workflow.paths import absolute, unreadable
from verl_workflow.spec._words import did_you_mean

# What verl gives to a reward, by name; see verl.workers.reward_manager.naive.
REWARD_ARGUMENTS = ("data_source", "solution_str", "ground_truth", "extra_info")


def is_file(reference: str) -> bool:
    """Whether a function is named by its file (``file.py:function``), not by its module."""
    return reference.rpartition(":")[0].endswith(".py")


def contained(base_dir: Path, name: str, where: str = "") -> Path:
    """The file or folder `name` below `base_dir`.

    Raises:
        UserError: SPEC_INVALID when it lies outside of `base_dir`, by a link too; FILE_MISSING when it is not there
            or cannot be looked for.
    """
    path = base_dir / name
    absolute(name, base=base_dir, where=where)
    try:
        inside = path.resolve().is_relative_to(base_dir.resolve())
        present = path.exists()
    except (OSError, RuntimeError) as error:
        # A RuntimeError is a circle of links.
        raise unreadable(name, error, where=where) from error
    if Path(name).is_absolute() or not inside:
        raise UserError(
            ErrorCode.SPEC_INVALID,
            "code that travels with a run lies in the folder of the pipeline file",
            where=where,
            value=name,
            remedy="Copy it there, or install it as a package and name its module.",
        )
    if not present:
        near = [entry.name for entry in path.parent.iterdir()] if path.parent.is_dir() else []
        raise UserError(
            ErrorCode.FILE_MISSING,
            f"there is no {name} in {base_dir}",
            where=where,
            value=name,
            remedy=did_you_mean(path.name, near) + "The path is relative to the pipeline file.",
        )
    return path


def module_file(base_dir: Path, module: str) -> Path | None:
    """The file of a module that lies in `base_dir`, or None."""
    path = base_dir.joinpath(*module.split("."))
    for candidate in (path / "__init__.py", path.with_name(f"{path.name}.py")):
        if candidate.is_file():
            return candidate
    return None


def parse(path: Path, where: str = "") -> ast.Module:
    """Raises UserError: SPEC_INVALID with the line when the file is not Python, FILE_MISSING when it cannot be read."""
    try:
        return ast.parse(path.read_bytes(), filename=str(path))
    except SyntaxError as error:
        line = f":{error.lineno}:{error.offset}" if error.lineno is not None else ""
        raise UserError(
            ErrorCode.SPEC_INVALID,
            f"{path}{line} is not valid Python: {error.msg}",
            where=where,
            value=(error.text or "").strip() or None,
            remedy="Mend the file.",
        ) from error
    except (ValueError, RecursionError, MemoryError) as error:
        # A parser at the end of its stack says MemoryError.
        reason = error if isinstance(error, ValueError) else "it is nested too deeply"
        raise UserError(ErrorCode.SPEC_INVALID, f"{path} is not valid Python: {reason}", where=where) from error
    except OSError as error:
        raise unreadable(path, error, where=where) from error


def check_function(reference: str, base_dir: Path, where: str) -> None:
    """Raise unless a function can be expected to load: its file or module is there and, as far as can be seen, has it.

    Raises:
        UserError: FILE_MISSING or SPEC_INVALID.
    """
    holder, _, function = reference.rpartition(":")
    if is_file(reference):
        path: Path | None = contained(base_dir, holder, where)
        assert path is not None
        if path.is_dir():
            raise UserError(ErrorCode.SPEC_INVALID, f"{holder} is a folder", where=where, value=reference)
    else:
        try:
            path = module_file(base_dir, holder) or _installed(holder, reference, where)
        except OSError as error:
            raise unreadable(holder, error, where=where) from error
    if path is None:
        return
    names = set(_defined(parse(path, where).body))
    if function not in names and "*" not in names:
        raise UserError(
            ErrorCode.SPEC_INVALID,
            f"{holder} defines no {function}",
            where=where,
            value=reference,
            remedy=f"{did_you_mean(function, names)}Define it at the top level of {path.name}.",
        )


def check_step(reference: str, base_dir: Path, args: Collection[str], where: str) -> None:
    """As `check_reward`, of a stage's function; a parameter named ``context`` needs no argument."""
    _check_arguments(reference, base_dir, args, where, how="with these args", free={"context"})


def check_reward(reference: str, base_dir: Path, kwargs: Collection[str], where: str) -> None:
    """Raise UserError(SPEC_INVALID) when a function of a file does not take what verl gives to a reward, by name.

    Nothing is said about decorated functions and those that are not defined in the file itself.
    """
    _check_arguments(reference, base_dir, [*REWARD_ARGUMENTS, *kwargs], where, how="as verl calls it")


def _check_arguments(
    reference: str, base_dir: Path, given: Collection[str], where: str, *, how: str, free: Collection[str] = ()
) -> None:
    holder, _, name = reference.rpartition(":")
    path = contained(base_dir, holder) if is_file(reference) else module_file(base_dir, holder)
    if path is None:
        return
    kinds = ast.FunctionDef, ast.AsyncFunctionDef
    found = [node for node in parse(path).body if isinstance(node, kinds) and node.name == name]
    if not found or found[-1].decorator_list:
        return
    signature = found[-1].args
    by_place = [each.arg for each in signature.posonlyargs]
    plain = by_place + [each.arg for each in signature.args]
    required = set(plain[: len(plain) - len(signature.defaults)])
    for each, default in zip(signature.kwonlyargs, signature.kw_defaults, strict=True):
        plain.append(each.arg)
        required |= {each.arg} if default is None else set()
    problems = [f"{each} can only be given by place" for each in by_place if each in required]
    problems += [f"it takes no {each}" for each in given if each not in plain and signature.kwarg is None]
    problems += [
        f"{each} is missing"
        for each in plain
        if each in required and each not in by_place and each not in given and each not in free
    ]
    if problems:
        raise UserError(
            ErrorCode.SPEC_INVALID,
            f"{reference} cannot be called {how}: {', '.join(problems)}",
            where=where,
            value=sorted(given),
            remedy=f"Its signature is {name}({ast.unparse(signature)}).",
        )


def _installed(module: str, reference: str, where: str) -> Path | None:
    """The source of an installed module when it can be found without importing anything, else None."""
    top, *rest = module.split(".")
    try:
        found = importlib.util.find_spec(top)
    except (ImportError, ValueError):
        found = None
    if found is None:
        raise UserError(
            ErrorCode.SPEC_INVALID,
            f"there is no module {top} beside the pipeline file or installed",
            where=where,
            value=reference,
            remedy="Install it, or name a file beside the pipeline file, as in file.py:function.",
        )
    if not rest:
        return _source(found.origin)
    for folder in found.submodule_search_locations or []:
        path = module_file(Path(folder), ".".join(rest))
        if path is not None:
            return path
    return None


def _source(origin: str | None) -> Path | None:
    return Path(origin) if origin and origin.endswith(".py") and Path(origin).is_file() else None


def _defined(body: list[ast.stmt]) -> Iterator[str]:
    """Names bound at the top level; ``*`` when more may be."""
    for node in body:
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            yield node.name
            if node.name == "__getattr__":
                yield "*"
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            yield from (alias.asname or alias.name.split(".")[0] for alias in node.names)
        elif isinstance(node, (ast.Assign, ast.AnnAssign)):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            for target in targets:
                yield from (name.id for name in ast.walk(target) if isinstance(name, ast.Name))
        for field in ("body", "orelse", "finalbody"):
            if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
                yield from _defined(getattr(node, field, []))
        for handler in getattr(node, "handlers", []):
            yield from _defined(handler.body)
