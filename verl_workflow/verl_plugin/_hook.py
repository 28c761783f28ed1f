"""Run a function once a module has been imported, without importing it."""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import logging
import sys
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

_log = logging.getLogger(__name__)


def after_import(name: str, action: Callable[[], None]) -> None:
    """Call `action` at once if the module `name` is imported already, else right after its first import.

    An exception in `action` is logged and leaves the import statement that caused it.
    """
    if name in sys.modules:
        action()
    else:
        sys.meta_path.insert(0, _Finder(name, action))


class _Finder(importlib.abc.MetaPathFinder):
    """Finds one module as the other finders would and has the action run after it; then it removes itself."""

    def __init__(self, name: str, action: Callable[[], None]) -> None:
        self.name = name
        self.action = action
        self._searching = False

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        # The others are asked in turn, among them perhaps another of this kind that waits for the same module.
        if fullname != self.name or self._searching:
            return None
        self._searching = True
        try:
            found = (finder.find_spec(fullname, path, target) for finder in list(sys.meta_path))
            spec = next((one for one in found if one is not None), None)
        finally:
            self._searching = False
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader, self)
        return spec


class _Loader(importlib.abc.Loader):
    """The module's own loader, and the action afterwards."""

    def __init__(self, loader: Any, finder: _Finder) -> None:
        self._loader = loader
        self._finder = finder

    def __getattr__(self, attribute: str) -> Any:
        return getattr(self._loader, attribute)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        module: ModuleType | None = self._loader.create_module(spec)
        return module

    def exec_module(self, module: ModuleType) -> None:
        # Whoever looks at the module later (inspect, pickle, importlib.resources) finds its own loader.
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        module.__loader__ = self._loader
        self._loader.exec_module(module)
        # Only now: an import that failed may be tried again.
        if self._finder in sys.meta_path:
            sys.meta_path.remove(self._finder)
        try:
            self._finder.action()
        except Exception:
            _log.exception("what was to happen after the import of %s failed", module.__name__)
            raise
