"""A function at rest: by the name of what it is in its module where it has one, so that mended code is what runs."""

from __future__ import annotations

import hashlib
import importlib
import inspect
import logging
import sys
from collections.abc import Callable
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

# Of the copy of a function: what it is a copy of.
ORIGINAL = "__verl_workflow_original__"
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
    try:
        text = inspect.getsource(inspect.unwrap(function)).encode()
    except (OSError, TypeError):
        return ""
    return hashlib.sha256(text).hexdigest()


def _body(thing: Any) -> Any:
    return getattr(thing, "_function", thing)
