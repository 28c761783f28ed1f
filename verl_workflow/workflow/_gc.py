"""Clearing away what a run needs no more: of its journal, what a snapshot says; of its files, what nothing names."""

from __future__ import annotations

import dataclasses
import logging
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, fields
from typing import Any

from verl_workflow.errors import ErrorCode, VerlWorkflowError
from verl_workflow.storage import Store
from verl_workflow.workflow._damage import damaged
from verl_workflow.workflow._definition import check_run_id, key_of, read_definition, run_exists
from verl_workflow.workflow._fold import FINAL_STATES, TERMINAL_STATES, Folded
from verl_workflow.workflow._host_life import host_keys
from verl_workflow.workflow._journal import STALE_AFTER_S, Journal
from verl_workflow.workflow._names import RunKey, is_incarnation, run_folder
from verl_workflow.workflow._progress import progress_key, read_progress
from verl_workflow.workflow._references import object_keys
from verl_workflow.workflow._snapshot import read_snapshot
from verl_workflow.workflow._state import list_runs

_log = logging.getLogger(__name__)


@dataclass(kw_only=True)
class Collected:
    """What was removed.

    Attributes:
        runs: how many were looked at. entries: of journals. bytes: of all that was removed.
        remains: files of deleted runs whose deletion was interrupted. unfinished: files whose writer died. hosts: signs
            of life of hosts that have given none for long.
        damaged: ids of runs that were left alone, for their records cannot be read.
    """

    runs: int = 0
    entries: int = 0
    snapshots: int = 0
    values: int = 0
    graphs: int = 0
    objects: int = 0
    progress: int = 0
    remains: int = 0
    unfinished: int = 0
    hosts: int = 0
    bytes: int = 0
    damaged: list[str] = field(default_factory=list)

    def add(self, other: Collected) -> None:
        for each in fields(self):
            setattr(self, each.name, getattr(self, each.name) + getattr(other, each.name))

    def to_json(self) -> dict[str, Any]:
        return {each.name: getattr(self, each.name) for each in fields(self)}


def collect_all(store: Store, *, stale_after_s: float = STALE_AFTER_S) -> Collected:
    """`collect` each run of a storage; one whose record is damaged keeps no other."""
    total = Collected()
    _sweep_remains(total, store, stale_after_s)
    hosts = _Sweep(store)
    hosts.remove(
        "hosts", [key for key in host_keys(store) if time.time() - (store.modified(key) or 0.0) >= stale_after_s]
    )
    total.add(dataclasses.replace(hosts.done, runs=0))
    for run_id in [state.run_id for state in list_runs(store)]:
        try:
            total.add(collect(store, run_id, stale_after_s=stale_after_s))
        except VerlWorkflowError as error:
            if error.code not in {ErrorCode.JOURNAL_DAMAGED, ErrorCode.RUN_UNKNOWN}:
                raise
            # Deleted meanwhile, or left for somebody to look at.
            if error.code is ErrorCode.JOURNAL_DAMAGED and run_exists(store, run_id):
                _log.warning("run %s is left alone: %s", run_id, error)
                total.add(Collected(runs=1, damaged=[run_id]))
    return total


def collect(store: Store, run_id: str, *, stale_after_s: float = STALE_AFTER_S) -> Collected:
    """Remove what a run needs no more. Status, outputs and metadata stay as they are, at whatever point it is stopped.

    A run that ended longer ago than `stale_after_s` keeps one snapshot, the journal's last entry, and what these name;
    a failed one also what its resumption may use. Any other keeps all but superseded snapshots.

    Raises:
        UserError: RUN_ID_INVALID or RUN_UNKNOWN.
        VerlWorkflowError(JOURNAL_DAMAGED): its record cannot be read; nothing was removed.
    """
    check_run_id(run_id)
    # Before the definition: another run may take the id, and its files are not remains.
    found_here = store.list(run_folder(run_id))
    stored = read_definition(store, run_id)
    key, definition = key_of(stored), stored["definition"]
    folder = key.folder
    # Before the state is read: what somebody who resumes the run writes from now on is not among them.
    parts = ("journal", "snapshots", "values", "graphs", "objects", "progress")
    found = {part: store.list(f"{folder}/{part}") for part in parts}
    journal = Journal(store, key)
    state = journal.read()
    swept = _Sweep(store)
    swept.remove("remains", _remains(store, found_here, key.incarnation, stale_after_s))
    swept.remove_unfinished(run_folder(run_id), stale_after_s)
    stale = state.ended_at is not None and time.time() - state.ended_at >= stale_after_s
    if state.status in TERMINAL_STATES and stale:
        journal.snapshot(renew=True)
        number = journal.length
        kept = read_snapshot(store, key)
        if kept is None or kept.next < number:
            raise damaged(f"{folder}/snapshots/{number:012}.json", "the snapshot just written cannot be read")
        # The last entry stays: without any, a lost snapshot would make the run look like a new one.
        swept.remove("entries", (key for key in found["journal"] if _number(key) < number - 1))
        _sweep_files(swept, store, key, definition, state, found)
    else:
        kept = read_snapshot(store, key)
        number = kept.next if kept is not None else 0
    swept.remove("snapshots", (key for key in found["snapshots"] if _number(key) < number))
    return swept.done


class _Sweep:
    """Removes files of one run, and counts them."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self.done = Collected(runs=1)

    def remove(self, what: str, keys: Iterable[str]) -> None:
        for key in keys:
            size = self._store.size(key)
            if size is None:
                # Another one is clearing away too.
                continue
            self._store.delete(key)
            setattr(self.done, what, getattr(self.done, what) + 1)
            self.done.bytes += size

    def remove_unfinished(self, folder: str, stale_after_s: float) -> None:
        for path, age, size in self._store.unfinished(folder):
            if age >= stale_after_s:
                path.unlink(missing_ok=True)
                self.done.unfinished += 1
                self.done.bytes += size


def _sweep_files(
    swept: _Sweep, store: Store, run: RunKey, definition: dict[str, Any], state: Folded, found: dict[str, list[str]]
) -> None:
    committed = [step.committed for step in state.steps.values() if step.committed is not None]
    values = {each.value_key for each in committed if each.value_key is not None}
    graphs = {step.continued.graph_key for step in state.steps.values() if step.continued is not None}
    if "workflow" in definition:
        graphs.add(definition["workflow"]["graph"])
    # Names of values hold the driver's epoch; a later one writes none of those.
    swept.remove("values", (key for key in found["values"] if key not in values))
    if state.status not in FINAL_STATES:
        # These are named by their content, and whoever resumes the run may come to the same; reports are read by it.
        return
    if "workflow" in definition:
        swept.remove("graphs", (key for key in found["graphs"] if key not in graphs))
        if found["objects"]:
            inline = [value.inline for each in committed if (value := each.value) is not None and value.inline]
            named = object_keys([*inline, *_contents(store.get, [*values, *graphs])], store)
            swept.remove("objects", (key for key in found["objects"] if key not in named))
    shown = {progress_key(run, name): (name, step) for name, step in state.steps.items()}
    swept.remove("progress", (key for key in found["progress"] if not _is_shown(store, run, shown.get(key))))


def _sweep_remains(total: Collected, store: Store, stale_after_s: float) -> None:
    """Remove what an interrupted deletion has left of runs that no definition names."""
    for folder in store.folders("runs"):
        if folder.startswith(".") or store.get(f"runs/{folder}/definition.json") is not None:
            continue
        swept = _Sweep(store)
        swept.remove("remains", list(_remains(store, store.list(f"runs/{folder}"), "", stale_after_s)))
        swept.remove_unfinished(f"runs/{folder}", stale_after_s)
        if swept.done.remains or swept.done.unfinished:
            store.delete_all([], f"runs/{folder}")
            total.add(dataclasses.replace(swept.done, runs=0))


def _remains(store: Store, keys: Iterable[str], present: str, stale_after_s: float) -> Iterable[str]:
    """Those of other runs than the present one; but a run that is being made is written before its definition."""
    others: dict[str, list[str]] = {}
    for key in keys:
        incarnation = _incarnation(key)
        if incarnation not in {None, present}:
            others.setdefault(str(incarnation), []).append(key)
    for found in others.values():
        newest = max(store.modified(key) or 0.0 for key in found)
        if time.time() - newest >= stale_after_s:
            yield from found


def _incarnation(key: str) -> str | None:
    """Of the run that a file belongs to; None for what belongs to none or to all of that id."""
    parts = key.split("/")
    return parts[2] if len(parts) > 3 and is_incarnation(parts[2]) else None


def _is_shown(store: Store, run: RunKey, step: tuple[str, Any] | None) -> bool:
    """Whether the state of the run shows what was reported: it is of the step's last attempt."""
    if step is None:
        return False
    name, folded = step
    report = read_progress(store, run, name)
    return report is not None and bool(folded.attempts) and folded.attempts[-1].number == report.attempt


def _contents(get: Callable[[str], bytes | None], keys: Iterable[str]) -> Iterable[bytes]:
    for key in keys:
        data = get(key)
        if data is not None:
            yield data


def _number(key: str) -> float:
    name = key.rsplit("/", 1)[-1].removesuffix(".json")
    # What is not ours is never removed.
    return int(name) if len(name) == 12 and name.isdecimal() else float("inf")
