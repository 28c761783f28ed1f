"""Values as a driver knows them: in the journal, in records that it has not written yet, and such that are not kept."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from verl_workflow.storage import Store
from verl_workflow.workflow._journal import Journal
from verl_workflow.workflow._records import StepSucceeded
from verl_workflow.workflow._values import INLINE_LIMIT, Codec, Value


class KnownValues:
    """All by the name of the step that has returned them, continuations followed to their end before."""

    def __init__(self, journal: Journal, store: Store) -> None:
        self._journal = journal
        self._store = store
        self._unwritten: dict[str, StepSucceeded] = {}
        self._held: dict[str, Any] = {}

    def record(self, event: StepSucceeded) -> None:
        """A commit that is going to be written."""
        self._unwritten[event.step] = event

    def written(self) -> None:
        """What was recorded is in the journal now."""
        self._unwritten.clear()

    def hold(self, name: str, held: Any) -> None:
        """Keep a value that is not written down, in whatever form its launcher has given it."""
        self._held[name] = held

    def is_held(self, name: str) -> bool:
        return name in self._held

    def drop(self, name: str) -> bool:
        """Let go of a value that is not written down; False when it is none."""
        return self._held.pop(name, None) is not None

    def stored(self, value: Value, key: str) -> Value:
        """The value as a commit names it: one that is for people to read, or large, goes into a file first."""
        if value.inline is None or (value.codec is not Codec.JSON and len(value.inline) <= INLINE_LIMIT):
            return value
        full = f"{key}.{'json' if value.codec is Codec.JSON else 'pkl'}"
        self._store.put(full, value.inline)
        return dataclasses.replace(value, inline=None, key=full)

    def for_call(self, sources: Mapping[str, str]) -> tuple[dict[str, Value | int], tuple[Any, ...]]:
        """What an attempt is given, by the names it knows: values, or numbers of the held ones that come second.

        Args:
            sources: for each input, the step that has returned it.
        """
        inputs: dict[str, Value | int] = {}
        held: list[Any] = []
        for name, source in sources.items():
            if source in self._held:
                inputs[name] = len(held)
                held.append(self._held[source])
            else:
                inputs[name] = self._value(source)
        return inputs, tuple(held)

    def loaded(self, sources: Mapping[str, str]) -> dict[str, Any]:
        """The same values themselves. Raises VerlWorkflowError(JOURNAL_DAMAGED) when one is not as recorded."""
        return {name: self._value(source).load(self._store, name) for name, source in sources.items()}

    def _value(self, name: str) -> Value:
        committed = self._unwritten.get(name) or self._journal.state.step(name).committed
        assert committed is not None and committed.value is not None, f"step {name} has no value"
        return committed.value
