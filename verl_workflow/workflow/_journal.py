"""The append-only log of a run: put-if-absent numbered files, so that of two writers one always finds out."""

from __future__ import annotations

import re
import time

from verl_workflow.errors import ErrorCode, FencedError, VerlWorkflowError
from verl_workflow.storage import Store
from verl_workflow.workflow._records import CancelRequested, Claimed, Entry, Event, damaged

_NAME = re.compile(r"([0-9]{12})\.json")
# S3 may refuse a conditional write because another one is under way, and that one may fail.
_CONFLICT_TRIES = 5
_CONFLICT_PAUSE_S = 0.2


class Journal:
    """A run's journal as seen by one reader or writer.

    Attributes:
        entries: all that have been read or written, in order.
        epoch: what this writer writes under, 0 until it has claimed the run.
        cancel_requested: whether a request to cancel was met since then.

    Not safe for use by several threads.
    """

    def __init__(self, store: Store, run_id: str) -> None:
        self._store = store
        self._run_id = run_id
        self._prefix = f"runs/{run_id}/journal"
        self._broken = False
        self.entries: list[Entry] = []
        self.epoch = 0
        self.cancel_requested = False

    def read(self) -> list[Entry]:
        """Read all entries.

        Raises:
            VerlWorkflowError(JOURNAL_DAMAGED): an entry is missing or not as it was written; names the file.
        """
        names = (key.rsplit("/", 1)[-1] for key in self._store.list(self._prefix))
        numbers = [int(match[1]) for match in map(_NAME.fullmatch, names) if match]
        for seq in range(len(self.entries), max(numbers, default=-1) + 1):
            entry = self._get(seq)
            if entry is None:
                raise damaged(self._key(seq), "it is missing, and later ones are there")
            self.entries.append(entry)
        return self.entries

    def newest_epoch(self) -> int:
        """That of the last claim, 0 when nobody ever claimed the run."""
        return next((entry.epoch for entry in reversed(self.entries) if isinstance(entry.event, Claimed)), 0)

    def poll(self) -> None:
        """As the owner, take in what others have appended.

        Raises:
            FencedError: another driver has claimed the run.
        """
        while (entry := self._get(len(self.entries))) is not None:
            self._absorb(entry)

    def claim(self, event: Claimed) -> bool:
        """Take the run under the next epoch; False when anything but a request to cancel came in between."""
        assert self.epoch == 0
        epoch = self.newest_epoch() + 1
        while True:
            found = self._create(event, epoch)
            if found is None:
                self.epoch = epoch
                return True
            if not isinstance(found.event, CancelRequested):
                return False
            self.entries.append(found)

    def append(self, event: Event) -> Entry:
        """As the owner, write the next entry.

        Raises:
            FencedError: another driver has claimed the run; nothing was written.
            VerlWorkflowError(STORAGE): it is not known whether the entry was written, so that this writer refuses
                to write any more.
        """
        assert self.epoch > 0, "claim the run first"
        assert not self._broken, "an earlier append is in doubt"
        while (found := self._create(event, self.epoch)) is not None:
            self._absorb(found)
        return self.entries[-1]

    def request(self, event: CancelRequested) -> None:
        """As anybody, write one entry after all others; `entries` then holds those that came before it too."""
        while (found := self._create(event, self.newest_epoch())) is not None:
            self.entries.append(found)

    def _absorb(self, entry: Entry) -> None:
        if entry.epoch > self.epoch:
            raise FencedError(
                ErrorCode.FENCED,
                f"another driver has taken the run over (epoch {entry.epoch}, this one's is {self.epoch})",
                where=self._run_id,
                remedy="Follow the run with: status. Nothing was committed by this driver since.",
            )
        if not isinstance(entry.event, CancelRequested):
            raise damaged(self._key(entry.seq), f"two drivers have written under epoch {entry.epoch}")
        self.cancel_requested = True
        self.entries.append(entry)

    def _create(self, event: Event, epoch: int) -> Entry | None:
        """Write `event` as the next entry; or, when that number is taken, return what is there."""
        seq = len(self.entries)
        now = max([time.time(), *(entry.time for entry in self.entries[-1:])])
        entry = Entry(seq=seq, epoch=epoch, time=now, event=event)
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
                return Entry.from_bytes(found, self._key(seq), seq)
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
        self.entries.append(entry)
        return None

    def _get(self, seq: int) -> Entry | None:
        data = self._store.get(self._key(seq))
        return None if data is None else Entry.from_bytes(data, self._key(seq), seq)

    def _key(self, seq: int) -> str:
        return f"{self._prefix}/{seq:012}.json"
