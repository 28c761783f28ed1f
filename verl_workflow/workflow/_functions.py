"""A function at rest: by the name of what it is in its module where it has one, so that mended code is what runs."""

from __future__ import annotations

import ast
import hashlib
import importlib
import inspect
import logging
import sys
import textwrap
import types
from collections.abc import Callable
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

# Of the copy of a function: what it is a copy of.
ORIGINAL = "__verl_workflow_original__"
# Of modules that postpone annotations.
_FUTURE = annotations.compiler_flag
_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Named:
    """A function, or the body of a remote one, of a module.

    Attributes:
        fallback: pickle of the function itself, for workers that cannot import the module.
    """

    module: str
    name: str
    fallback: bytes

    def load(self) -> Callable[..., Any]:
        """The function as its module has it now."""
        try:
            found = _body(attrgetter(self.name)(importlib.import_module(self.module)))
        except (ImportError, AttributeError) as error:
            _log.info("%s.%s cannot be imported here, and runs as it was: %s", self.module, self.name, error)
            from ray import cloudpickle

            found = cloudpickle.loads(self.fallback)
        return found  # type: ignore[no-any-return]


def at_rest(function: Callable[..., Any]) -> Any:
    """What stands for a function in a pickle: a `Named`, or itself when no module has it under its name."""
    module, name = getattr(function, "__module__", None), getattr(function, "__qualname__", "")
    if module in {None, "__main__"} or "<" in name:
        return function
    try:
        present = _body(attrgetter(name)(sys.modules[module]))
    except (KeyError, AttributeError):
        return function
    if present is not function and present is not getattr(function, ORIGINAL, None):
        return function
    from ray import cloudpickle

    return Named(module=module, name=name, fallback=cloudpickle.dumps(function))


def loaded(stands_for: Any) -> Callable[..., Any]:
    """The function behind `at_rest`."""
    if isinstance(stands_for, Named):
        return stands_for.load()
    return stands_for  # type: ignore[no-any-return]


def fingerprint(function: Callable[..., Any]) -> str:
    """Digest of a function's source; empty when it travels itself, and so never changes, or has no source."""
    if not isinstance(at_rest(function), Named):
        return ""
    text = _source(inspect.unwrap(function))
    return hashlib.sha256(text.encode()).hexdigest() if text else ""


def _source(function: Callable[..., Any]) -> str:
    """The text of a function; its file may have been edited since it was imported, and have it elsewhere."""
    try:
        text, code = inspect.getsource(function), function.__code__
        whole, _ = inspect.findsource(function)
    except (OSError, TypeError, AttributeError):
        return ""
    if _does(text, code):
        return text
    for found in _definitions("".join(whole), code.co_name):
        first = min([found.lineno, *(each.lineno for each in found.decorator_list)])
        other = "".join(whole[first - 1 : found.end_lineno])
        if _does(other, code):
            return other
    # A text by itself is not always compiled as it is inside of its class.
    return text if _definitions(textwrap.dedent(text), code.co_name) else ""


def _definitions(text: str, name: str) -> list[ast.FunctionDef | ast.AsyncFunctionDef]:
    try:
        tree = ast.parse(text)
    except SyntaxError:
        return []
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef)
    return [each for each in ast.walk(tree) if isinstance(each, kinds) and each.name == name]


def _does(text: str, code: types.CodeType) -> bool:
    """Whether a definition is that of the code."""
    try:
        flags = code.co_flags & _FUTURE
        made = compile(textwrap.dedent(text), code.co_filename, "exec", flags=flags, dont_inherit=True)
    except SyntaxError:
        return False
    return any(_alike(each, code) for each in made.co_consts if isinstance(each, types.CodeType))


def _alike(one: types.CodeType, other: types.CodeType) -> bool:
    same = one.co_name == other.co_name and one.co_names == other.co_names and one.co_varnames == other.co_varnames
    if not same or one.co_code != other.co_code or len(one.co_consts) != len(other.co_consts):
        return False
    return all(
        _alike(mine, theirs)
        if isinstance(mine, types.CodeType) and isinstance(theirs, types.CodeType)
        else (type(mine), mine) == (type(theirs), theirs)
        for mine, theirs in zip(one.co_consts, other.co_consts, strict=True)
    )


def _body(thing: Any) -> Any:
    return getattr(thing, "_function", thing)
