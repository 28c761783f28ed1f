"""The log of a run: records written with put-if-absent, one owner at a time, fenced by epochs."""

from __future__ import annotations

import time
from typing import TypeVar

from verl_workflow.errors import ErrorCode, FencedError
from verl_workflow.storage import Store
from verl_workflow.workflow._records import CancelRequested, Claimed, Record, parse

_R = TypeVar("_R", bound=Record)


class Journal:
    """The records of one run, as far as they have been read, and the way to add one.

    A writer whose next number is taken reads on: a record of a newer epoch there fences it, a bystander's (a request to
    cancel) is taken in. So of two drivers only the newer can commit, with no lock service.
    """

    def __init__(self, store: Store, run_id: str) -> None:
        self._store = store
        self.run_id = run_id
        self._prefix = f"runs/{run_id}/journal"
        self.records: list[Record] = []

    @property
    def epoch(self) -> int:
        """The newest epoch seen; 0 when nobody has claimed the run."""
        return max((record.epoch for record in self.records if isinstance(record, Claimed)), default=0)

    def read(self) -> list[Record]:
        """Take in what has been written since; returns the new records.

        Raises:
            VerlWorkflowError(JOURNAL_DAMAGED): a record is not one.
        """
        new: list[Record] = []
        while (data := self._store.get(self._key(len(self.records)))) is not None:
            record = parse(self._key(len(self.records)), data)
            self.records.append(record)
            new.append(record)
        return new

    def append(self, cls: type[_R], *, epoch: int, **content: object) -> _R:
        """Add a record of `cls`, after whatever others have written meanwhile.

        Raises:
            FencedError: a newer epoch has claimed the run; nothing was written.
        """
        while True:
            self.read()
            if epoch and self.epoch > epoch and cls is not Claimed:
                raise fenced(self.run_id, epoch, self.epoch)
            if cls is Claimed and self.epoch >= epoch:
                raise fenced(self.run_id, epoch, self.epoch)
            seq = len(self.records)
            record = cls(seq=seq, epoch=epoch, time=self._now(), **content)
            if self._store.create(self._key(seq), record.to_bytes()):
                self.records.append(record)
                return record

    def cancel_requested(self) -> bool:
        return any(isinstance(record, CancelRequested) for record in self.records)

    def _now(self) -> float:
        # Never before the record it follows, whatever the clocks of the hosts say.
        last = self.records[-1].time if self.records else 0.0
        return max(time.time(), last)

    def _key(self, seq: int) -> str:
        return f"{self._prefix}/{seq:012}.json"


def fenced(run_id: str, epoch: int, newer: int) -> FencedError:
    return FencedError(
        ErrorCode.FENCED,
        f"another driver has taken the run over (epoch {newer}; this one had {epoch})",
        where=run_id,
        remedy="Leave it to that driver; nothing was committed here since.",
    )
