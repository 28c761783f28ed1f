"""`logs`: what the stages wrote, in order, each line once, over all attempts."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from verl_workflow.cli import _options
from verl_workflow.cli._output import note, print_json, print_line, reported
from verl_workflow.cli._tail import Tail
from verl_workflow.cli._words import command, liveness, moment
from verl_workflow.errors import ErrorCode, UserError

if TYPE_CHECKING:
    from verl_workflow.cli._facts import AttemptFacts, RunFacts

_POLL_S = 0.5


def logs(
    run_id: _options.RunId,
    storage: _options.Storage = None,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on until the run ends.")] = False,
    stage: Annotated[
        str | None, typer.Option("--stage", metavar="NAME", help="Of this stage only.", show_default=False)
    ] = None,
    as_json: _options.Json = False,
) -> None:
    """Print the logs of a run. Lines read `stage#attempt | text`; `--json` prints one document at the end."""
    with reported(as_json):
        from verl_workflow.cli._facts import facts_of
        from verl_workflow.cli._find import find_run, near
        from verl_workflow.workflow import read_run

        store, state = find_run(storage, run_id)
        facts = facts_of(state, store.uri)
        names = [each.name for each in facts.stages]
        if stage is not None and stage not in names:
            raise UserError(
                ErrorCode.SPEC_INVALID,
                "the run has no such stage",
                where=run_id,
                value=stage,
                remedy=near(stage, names) or f"Its stages are {', '.join(names)}.",
            )
        book = LogBook(stage)
        kept: list[Entry] = []
        silent = False
        while True:
            for entry in book.news(facts):
                if as_json:
                    kept.append(entry)
                else:
                    print_line(str(entry))
            if not follow or facts.ended:
                break
            if facts.resumable and not silent:
                note(f"{liveness(facts)}; resume with: {command('resume', run_id, store.uri)}")
            silent = facts.resumable
            time.sleep(_POLL_S)
            facts = facts_of(read_run(store, run_id), store.uri)
        if as_json:
            lines = [{"stage": entry.stage, "attempt": entry.attempt, "line": entry.line} for entry in kept]
            print_json({"run_id": run_id, "status": facts.status, "lines": lines})


@dataclass(frozen=True)
class Entry:
    """One line of a log."""

    stage: str
    attempt: int
    line: str

    def __str__(self) -> str:
        return f"{self.stage}#{self.attempt} | {self.line}"


class LogBook:
    """Remembers what has been told, so that each look yields only news.

    Args:
        stage: of this stage only; None for all.
    """

    def __init__(self, stage: str | None = None) -> None:
        self._stage = stage
        self._tails: dict[tuple[str, int], Tail] = {}
        self._told: set[tuple[str, int, str]] = set()

    def news(self, facts: RunFacts) -> Iterator[Entry]:
        """Lines since the last look, attempt by attempt: that it began, what it wrote, how it ended."""
        for stage in facts.stages:
            if self._stage not in (None, stage.name):
                continue
            for attempt in stage.attempts:
                yield from self._note(stage.name, attempt, "began", f"-- began {moment(attempt.started_at)}")
                key = (stage.name, attempt.number)
                tail = self._tails.setdefault(key, Tail(log_file(facts, stage.name, attempt.number)))
                for line in tail.lines(ended=bool(attempt.outcome)):
                    yield Entry(*key, line)
                if attempt.outcome:
                    yield from self._note(stage.name, attempt, "ended", f"-- {attempt.outcome}")

    def _note(self, stage: str, attempt: AttemptFacts, what: str, text: str) -> Iterator[Entry]:
        key = (stage, attempt.number, what)
        if key not in self._told:
            self._told.add(key)
            for line in text.splitlines():
                yield Entry(stage, attempt.number, line)


def log_file(facts: RunFacts, stage: str, attempt: int) -> Path:
    """Where an attempt's own log lies, if it writes one."""
    return Path(facts.artifacts) / "runs" / facts.run_id / "stages" / stage / "attempts" / f"{attempt:03d}" / "log.txt"
