"""The registry of models, as far as records tell it: files are looked at only where they are mounted."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from verl_workflow.errors import ErrorCode, UserError
from verl_workflow.registry import AliasRecord, Registry
from verl_workflow.storage import Store


class _Records(Registry):
    """A registry on a machine that may lack the file system of the models."""

    def __init__(self, storage: str, files: str | None) -> None:
        store = Store(storage)
        self._files = Path(files) if files else store.local_path
        super().__init__(store, self._files or Path())

    def verify(self, model: str, version: str, *, contents: bool = True) -> None:
        if self._files is not None and self._files.is_dir():
            super().verify(model, version, contents=contents)


def moved_to(
    storage: str, model: str, alias: str, *, version: str | None = None, after: int = 0
) -> dict[str, Any] | None:
    """Where an alias points, or None while it is not there yet.

    Args:
        version: only this one counts; None: any. after: only moves with a higher number count.
    """
    found = Registry(Store(storage), Path()).alias(model, alias)
    if found is None or found.number <= after or version not in {None, found.version}:
        return None
    return _told(found)


def promote(
    storage: str, model: str, version: str, alias: str, *, by: tuple[str, str], expected: str | None = None
) -> dict[str, Any]:
    """Point an alias to a version, once for each `by`: a DAG run and a task.

    Args:
        expected: what the alias has to point to before; None: anything, or nothing.

    Returns:
        ``model``, ``alias``, ``version``, ``number``, ``previous`` (a version or None) and ``moved``.

    Raises:
        UserError: MODEL_UNKNOWN. VerlWorkflowError(REGISTRY_CONFLICT): it points elsewhere than expected.
    """
    registry = Registry(Store(storage), Path())
    history = registry.history(model, alias)
    for move in history:
        if (move.run, move.stage) == by and move.version == version:
            # An earlier try got this far, and whatever came after it is not to be undone.
            return {**_told(move), "previous": None, "moved": False}
    before = history[-1] if history else None
    if before is not None and before.version == registry.resolve(model, version).version:
        return {**_told(before), "previous": before.version, "moved": False}
    previous = before.version if before is not None else None
    if expected is not None and expected != previous:
        raise UserError(
            ErrorCode.REGISTRY_CONFLICT,
            f"{model}'s {alias} is {previous or 'not set'}, not {expected}",
            where=storage,
            remedy="See who has moved it (verl-workflow models), and decide anew.",
        )
    number = before.number if before is not None else None
    move = registry.set_alias(model, alias, version, number, run=by[0], stage=by[1])
    return {**_told(move), "previous": previous, "moved": True}


def moves_of(storage: str, model: str, alias: str) -> int:
    """The number of the alias' newest move, 0 when it has never been set."""
    found = Registry(Store(storage), Path()).alias(model, alias)
    return found.number if found is not None else 0


def roll_back(
    storage: str, model: str, alias: str, *, seen: int, to: str | None = None, files: str | None = None
) -> dict[str, Any]:
    """Point an alias back: to a version, or to the one before the present one. The result is that of `promote`.

    Args:
        seen: the alias' newest move when this was decided. One step back since then is this one.
        files: folder of the registry's files, if it is mounted here: they are verified then.

    Raises:
        UserError: MODEL_UNKNOWN; REGISTRY_CONFLICT, somebody else has moved the alias since. VerlWorkflowError:
            MODEL_INVALID, the version's files are damaged.
    """
    registry = _Records(storage, files)
    present = registry.alias(model, alias)
    if present is not None and present.number != seen:
        if present.number == seen + 1 and present.rollback and to in {None, present.version}:
            return {**_told(present), "previous": None, "moved": False}
        raise UserError(
            ErrorCode.REGISTRY_CONFLICT,
            f"{model}'s {alias} was moved meanwhile, to {present.version}",
            where=storage,
            remedy="See who has moved it (verl-workflow models), and clear the task if it is still to go back.",
        )
    move = registry.rollback(model, alias, to)
    return {**_told(move), "previous": present.version if present is not None else None, "moved": True}


def _told(move: AliasRecord) -> dict[str, Any]:
    return {"model": move.model, "alias": move.alias, "version": move.version, "number": move.number}
