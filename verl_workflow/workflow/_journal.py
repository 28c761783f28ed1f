"""The append-only log of a run: put-if-absent numbered files, so that of two writers one always finds out."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator, Sequence

from verl_workflow.errors import ErrorCode, FencedError, UserError, VerlWorkflowError
from verl_workflow.storage import Store
from verl_workflow.workflow._clock import clock
from verl_workflow.workflow._damage import damaged
from verl_workflow.workflow._definition import run_key
from verl_workflow.workflow._fold import Folded
from verl_workflow.workflow._names import RunKey
from verl_workflow.workflow._records import CancelRequested, Claimed, Entry, Event
from verl_workflow.workflow._snapshot import Snapshot, read_snapshot, write_snapshot

_NAME = re.compile(r"([0-9]{12})\.json")
# S3 may refuse a conditional write because another one is under way, and that one may fail.
_CONFLICT_TRIES = 5
_CONFLICT_PAUSE_S = 0.2
# A resumed driver reads one snapshot and fewer entries than this. Each snapshot holds all steps, so that runs of many
# steps get one less often: each entry then costs the writing of about fifty steps' states.
_SNAPSHOT_EVERY = 100
_STEPS_AN_ENTRY = 50
# Whoever deletes a run has seen its driver silent for longer, and the driver may wake after that.
_LOOK_AGAIN_S = 5.0
# `gc` leaves the entries of a run alone that somebody has written to so lately.
STALE_AFTER_S = 3600.0


class Journal:
    """A run's journal as seen by one reader or writer.

    Attributes:
        state: what all that was read or written adds up to.
        length: how many entries that is.
        epoch: what this writer writes under, 0 until it has claimed the run.
        cancel_requested: whether a request to cancel was met since then.

    Not safe for use by several threads.
    """

    def __init__(self, store: Store, key: RunKey) -> None:
        self._store = store
        self._run = key
        self._folder = key.folder
        self._broken = False
        self._time = 0.0
        self._snapshot_at = 0
        self._looked_at = self._there_at = clock()
        self._root: tuple[int, int] | None = None
        self.state = Folded()
        self.length = 0
        self.epoch = 0
        self.cancel_requested = False

    def read(self) -> Folded:
        """Take in all entries; those that `gc` has removed by the snapshot that stands for them.

        Raises:
            VerlWorkflowError(JOURNAL_DAMAGED): an entry is not as it was written; or it is missing, and no snapshot
                that can be read stands for it. Names the file.
        """
        # Read before the entries: a snapshot that is written meanwhile may be ahead of what is seen of them.
        newest = self._newest_snapshot() if self.length == 0 else 0
        if newest:
            self._load_snapshot()
        while True:
            try:
                for entry in self._after(self.length):
                    self._take(entry)
                break
            except VerlWorkflowError as error:
                # Perhaps removed a moment ago, and the snapshot is there now.
                if error.code is not ErrorCode.JOURNAL_DAMAGED or not self._load_snapshot():
                    raise
        if self.length < newest and not self._load_snapshot():
            raise damaged(self._snapshot_key(newest), f"it cannot be read, and entry {self.length} is missing")
        return self.state

    def entries(self) -> Iterator[Entry]:
        """All entries that `gc` has left, as they lie in the storage; for those who want the history."""
        return self._after(min(self._numbers(0), default=0))

    def poll(self) -> None:
        """As the owner, take in what others have appended.

        Raises:
            FencedError: another driver has claimed the run, or it was deleted.
            VerlWorkflowError(STORAGE): its folder is not the one any more in which the run was claimed.
        """
        self._check_storage()
        if clock() - self._there_at > _LOOK_AGAIN_S:
            self._check_there()
        while (entry := self._get(self.length)) is not None:
            self._absorb(entry)
        self._looked_at = clock()

    def claim(self, event: Claimed, *more: Event) -> bool:
        """Take the run under the next epoch; False when anything but a request to cancel came in between.

        Args:
            more: what holds from the claim on, in the same entry.

        Raises:
            FencedError: the run was ended by another driver since it was read, and its journal cleared away.
        """
        assert self.epoch == 0
        epoch = self.state.epoch + 1
        while True:
            found = self._create((event, *more), epoch)
            if found is None:
                self._check_number()
                self.epoch, self._root = epoch, self._store.identity()
                return True
            if any(not isinstance(each, CancelRequested) for each in found.events):
                return False
            self._take(found)

    def append(self, *events: Event) -> None:
        """As the owner, write the next entry: all of the events, or none.

        Raises:
            FencedError: another driver has claimed the run, or it was deleted; nothing of it counts.
            VerlWorkflowError(STORAGE): it is not known whether the entry was written, so that this writer refuses
                to write any more.
        """
        assert self.epoch > 0, "claim the run first"
        assert not self._broken, "an earlier append is in doubt"
        self._check_storage()
        while (found := self._create(events, self.epoch)) is not None:
            self._absorb(found)
        away = clock() - self._looked_at
        if away > _LOOK_AGAIN_S:
            self._check_there()
        if away > STALE_AFTER_S / 2:
            # After so long a sleep the run may have been ended, and what lay at this number been cleared away.
            self._check_ownership()
        if self.length - self._snapshot_at >= max(_SNAPSHOT_EVERY, len(self.state.steps) // _STEPS_AN_ENTRY):
            self.snapshot()

    def request(self, event: CancelRequested) -> None:
        """As anybody, write one entry after all others; `state` then knows those that came before it too."""
        while (found := self._create((event,), self.state.epoch)) is not None:
            self._take(found)

    def snapshot(self, *, renew: bool = False) -> None:
        """Keep what the journal adds up to.

        Args:
            renew: replace what is there under this number, which says the same unless it is damaged.
        """
        write_snapshot(
            self._store,
            self._run,
            Snapshot(next=self.length, time=self._time, state=self.state),
            renew=renew,
        )
        self._snapshot_at = self.length

    def _load_snapshot(self) -> bool:
        """Go on from the newest snapshot that can be read; False when it tells nothing new."""
        snapshot = read_snapshot(self._store, self._run)
        if snapshot is None or snapshot.next <= self.length:
            return False
        self.state, self.length, self._time = snapshot.state, snapshot.next, snapshot.time
        self._snapshot_at = snapshot.next
        return True

    def _newest_snapshot(self) -> int:
        """The number of the newest snapshot, readable or not; 0 when there is none."""
        names = (key.rsplit("/", 1)[-1] for key in self._store.list(f"{self._folder}/snapshots"))
        return max((int(match[1]) for match in map(_NAME.fullmatch, names) if match), default=0)

    def _check_number(self) -> None:
        """Raise FencedError when the entry just written lies where another one had been cleared away."""
        if self._newest_snapshot() > self.length:
            self._store.delete(self._key(self.length - 1))
            other = Journal(self._store, self._run).read()
            raise _fenced(other.epoch, self.state.epoch, self._run.run_id)

    def _check_storage(self) -> None:
        """A disk that was unmounted, or moved away, leaves an empty folder: what is written there is lost."""
        if self._root is not None and self._store.identity() != self._root:
            raise VerlWorkflowError(
                ErrorCode.STORAGE,
                "the storage's folder was moved away, or something else is mounted there",
                where=self._store.uri,
                remedy="Bring it back, and resume.",
                retryable=True,
            )

    def _check_there(self) -> None:
        """Raise FencedError when this is not the run of its id any more."""
        try:
            there = run_key(self._store, self._run.run_id) == self._run
        except UserError:
            there = False
        if not there:
            raise deleted(self._run.run_id)
        self._there_at = clock()

    def _check_ownership(self) -> None:
        self._check_number()
        other = Journal(self._store, self._run)
        other.read()
        self._looked_at = clock()
        if other.state.epoch > self.epoch:
            raise _fenced(other.state.epoch, self.epoch, self._run.run_id)

    def _absorb(self, entry: Entry) -> None:
        if entry.epoch > self.epoch:
            raise _fenced(entry.epoch, self.epoch, self._run.run_id)
        if any(not isinstance(event, CancelRequested) for event in entry.events):
            raise damaged(self._key(entry.seq), f"two drivers have written under epoch {entry.epoch}")
        self.cancel_requested = True
        self._take(entry)

    def _take(self, entry: Entry) -> None:
        self.state.add(entry, self._key(entry.seq))
        self.length, self._time = entry.seq + 1, entry.time

    def _create(self, events: Sequence[Event], epoch: int) -> Entry | None:
        """Write `events` as the next entry; or, when that number is taken, return what is there."""
        seq = self.length
        entry = Entry(
            run=self._run.incarnation,
            seq=seq,
            epoch=epoch,
            time=max(time.time(), self._time),
            events=tuple(events),
        )
        data = entry.to_bytes()
        self._broken = True
        for _ in range(_CONFLICT_TRIES):
            if self._store.create(self._key(seq), data):
                break
            found = self._store.get(self._key(seq))
            if found == data:
                # Ours: the answer to the request got lost, and the client asked again.
                break
            if found is not None:
                self._broken = False
                return self._parsed(found, seq)
            time.sleep(_CONFLICT_PAUSE_S)
        else:
            raise VerlWorkflowError(
                ErrorCode.STORAGE,
                "the storage refuses a new journal entry and shows none",
                where=self._key(seq),
                remedy="Check that the storage supports conditional writes.",
                retryable=True,
            )
        self._broken = False
        self._take(entry)
        return None

    def _after(self, first: int) -> Iterator[Entry]:
        keys = [self._key(seq) for seq in range(first, max(self._numbers(first), default=-1) + 1)]
        for seq, (key, data) in enumerate(zip(keys, self._store.get_all(keys), strict=True), first):
            if data is None:
                raise damaged(key, "it is missing, and later ones are there")
            yield self._parsed(data, seq)

    def _numbers(self, first: int) -> list[int]:
        start = self._key(first - 1) if first > 0 else None
        names = (key.rsplit("/", 1)[-1] for key in self._store.list(f"{self._folder}/journal", after=start))
        return [int(match[1]) for match in map(_NAME.fullmatch, names) if match]

    def _get(self, seq: int) -> Entry | None:
        data = self._store.get(self._key(seq))
        return None if data is None else self._parsed(data, seq)

    def _parsed(self, data: bytes, seq: int) -> Entry:
        return Entry.from_bytes(data, self._key(seq), seq, self._run.incarnation)

    def _snapshot_key(self, number: int) -> str:
        return f"{self._folder}/snapshots/{number:012}.json"

    def _key(self, seq: int) -> str:
        return f"{self._folder}/journal/{seq:012}.json"


def deleted(run_id: str) -> FencedError:
    """What a driver is told whose run is not the one of its id any more."""
    return FencedError(
        ErrorCode.FENCED,
        "the run was deleted",
        where=run_id,
        remedy="Start it anew if it was not meant to be. Nothing of what this driver still did counts.",
    )


def _fenced(theirs: int, mine: int, run_id: str) -> FencedError:
    return FencedError(
        ErrorCode.FENCED,
        f"another driver has taken the run over (epoch {theirs}, this one's is {mine})",
        where=run_id,
        remedy="Follow the run with: status. Nothing was committed by this driver since.",
    )
