"""Records of a source -> the distinct rows kept, spilled to disk, and the rejected ones with their reasons."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from verl_workflow.data._rows import Reason, Status
from verl_workflow.errors import ErrorCode, UserError

_EXAMPLES = 3
_REPORT_EVERY = 1000


@dataclass(kw_only=True)
class Tally:
    """Rows seen, and those rejected: `counts` by reason, with the first few `examples`."""

    seen: int = 0
    counts: Counter[str] = field(default_factory=Counter)
    examples: list[str] = field(default_factory=list)

    @property
    def rejected(self) -> int:
        return sum(self.counts.values())

    def check(self, max_rejected: float, file: Path) -> None:
        """Raise UserError(DATA_INVALID) when a larger share than `max_rejected` was rejected."""
        if not self.rejected or self.rejected <= max_rejected * self.seen:
            return
        counts = ", ".join(f"{count} {reason}" for reason, count in self.counts.most_common())
        shown = "; ".join(self.examples)
        raise UserError(
            ErrorCode.DATA_INVALID,
            f"{self.rejected} of {self.seen} rows were rejected, and max_rejected allows a share of {max_rejected:g}: "
            f"{counts}. First: {shown}",
            where=str(file),
            remedy="Mend the rows listed in that file, or raise max_rejected.",
        )


class Spill:
    """Kept rows on disk as JSON lines, in source order, with the digest of each question in memory."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.questions: dict[bytes, None] = {}

    def __len__(self) -> int:
        return len(self.questions)

    def rows(self) -> Iterator[tuple[bytes, dict[str, Any]]]:
        """(digest of the question, row) in source order."""
        with self.path.open(encoding="utf-8") as lines:
            for key, line in zip(self.questions, lines, strict=True):
                yield key, json.loads(line)


def collect(
    records: Iterable[Mapping[str, Any]],
    spill: Spill,
    rejected: IO[str],
    tally: Tally,
    *,
    held_out: Mapping[bytes, None],
    drawn: int | None,
    report: Callable[[Mapping[str, Any]], None],
) -> set[str]:
    """Keep each distinct question once, and return the sources that gave a row.

    Args:
        records: what `Converter` yields, in source order.
        spill: kept rows are appended to it.
        rejected: one JSON line for each rejected row is written to it.
        held_out: questions that must not be kept.
        drawn: stop as soon as `spill` has so many rows, and pass over repeated questions without counting them, as
            generators make them; None takes every row and rejects repeated ones.
        report: called every 1000 rows.

    Raises:
        UserError(DATA_INVALID): a source is damaged; names file and row.
    """
    sources: set[str] = set()
    with spill.path.open("a", encoding="utf-8") as kept:
        for record in records:
            if record["status"] == Status.BROKEN.value:
                raise UserError(
                    ErrorCode.DATA_INVALID,
                    record["detail"],
                    where=f"{record['source']}:{record['row']}",
                    remedy="Write or copy the file again, or take it out of the source.",
                )
            sources.add(record["source"])
            reason, detail = record["reason"], record["detail"]
            key = bytes.fromhex(record["question"])
            if record["status"] == Status.KEPT.value and (key in held_out or key in spill.questions):
                if drawn is not None:
                    continue
                repeated = key in spill.questions
                reason = (Reason.DUPLICATE if repeated else Reason.HELD_OUT).value
                detail = "an earlier row asks the same" if repeated else "a validation row asks the same"
            tally.seen += 1
            if tally.seen % _REPORT_EVERY == 0:
                report({"rows": tally.seen, "rejected": tally.rejected})
            if reason:
                place = {"source": record["source"], "row": record["row"]}
                rejected.write(json.dumps({**place, "reason": reason, "detail": detail}) + "\n")
                tally.counts[reason] += 1
                if len(tally.examples) < _EXAMPLES:
                    tally.examples.append(f"{record['source']}:{record['row']}: {detail}")
                continue
            spill.questions[key] = None
            payload = json.loads(record["payload"])
            kept.write(json.dumps({**payload, "source": record["source"], "row": record["row"]}) + "\n")
            if drawn is not None and len(spill) >= drawn:
                break
    return sources
