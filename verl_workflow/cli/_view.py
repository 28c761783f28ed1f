"""What is shown while a run goes on: a table that is redrawn, or one line for each change."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Protocol

from verl_workflow.cli._facts import RunFacts, StageFacts
from verl_workflow.cli._output import interactive, note
from verl_workflow.cli._words import duration, figure, pace, with_values

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

STYLES = {
    "waiting": "dim",
    "running": "cyan",
    "retrying": "yellow",
    "succeeded": "green",
    "failed": "bold red",
    "tolerated": "yellow",
    "interrupted": "yellow",
    "resumable": "yellow",
    "cancelled": "yellow",
}
_BAR_WIDTH = 20
# On a pipe, a training that takes a second a step must not fill a log by itself.
_SECONDS_BETWEEN_LINES = 10.0


class View(Protocol):
    """Shows a run as it goes on; `close` leaves the terminal as it was found."""

    def show(self, facts: RunFacts) -> None: ...

    def close(self) -> None: ...


def open_view(quiet: bool) -> View:
    """The view that suits where stderr leads."""
    if quiet:
        return SilentView()
    return LiveView() if interactive() else LineView()


class SilentView:
    """Shows nothing."""

    def show(self, facts: RunFacts) -> None:
        pass

    def close(self) -> None:
        pass


class LineView:
    """One line for each change of a stage, and at most one of progress every ten seconds."""

    def __init__(self, write: Callable[[str], None] = note, clock: Callable[[], float] = time.monotonic) -> None:
        self._write = write
        self._clock = clock
        self._seen: dict[str, tuple[Any, ...]] = {}
        self._progress: dict[str, str] = {}
        self._written_at = -_SECONDS_BETWEEN_LINES

    def show(self, facts: RunFacts) -> None:
        for stage in facts.stages:
            change = (stage.status, stage.attempt, stage.reused_from)
            if self._seen.setdefault(stage.name, ("waiting", 0, None)) != change:
                self._seen[stage.name] = change
                self._write(f"{time.strftime('%H:%M:%S')} {transition(stage)}")
        now = self._clock()
        if now - self._written_at < _SECONDS_BETWEEN_LINES:
            return
        for stage in facts.stages:
            text = progress(stage) if stage.status == "running" else ""
            if text and self._progress.get(stage.name) != text:
                self._progress[stage.name] = text
                self._written_at = now
                self._write(f"{time.strftime('%H:%M:%S')} {stage.name}: {text}")

    def close(self) -> None:
        pass


class LiveView:
    """A table of all stages, redrawn in place."""

    def __init__(self, console: Console | None = None) -> None:
        from rich.console import Console
        from rich.live import Live

        self._live = Live(
            console=console or Console(stderr=True, markup=False, emoji=False),
            auto_refresh=False,
            redirect_stdout=False,
            redirect_stderr=False,
        )
        self._live.start()

    def show(self, facts: RunFacts) -> None:
        self._live.update(table(facts), refresh=True)

    def close(self) -> None:
        self._live.stop()


def transition(stage: StageFacts) -> str:
    """A stage's latest change, in a line."""
    if stage.reused_from:
        return f"{stage.name}: re-used from {stage.reused_from}"
    attempt = f" (attempt {stage.attempt})" if stage.attempt > 1 or stage.status == "running" else ""
    took = f" after {duration(stage.elapsed)}" if stage.ended and stage.elapsed is not None else ""
    why = f": {first_line(stage.error)}" if stage.error else ""
    return f"{stage.name}: {stage.status}{attempt}{took}{why}"


def first_line(error: Mapping[str, Any]) -> str:
    """What an error says first; all of it is in the logs and in the summary."""
    return next(iter(str(error.get("message", "")).splitlines()), "")


def progress(stage: StageFacts) -> str:
    """How far a stage has come, in a line; empty when it has said nothing."""
    parts = []
    if stage.phase and stage.phase != "training":
        parts.append(stage.phase)
    if stage.done is not None:
        parts.append(f"{stage.unit} {stage.done}/{stage.total}" if stage.total else f"{stage.done} {stage.unit}s")
    if stage.reward is not None:
        parts.append(f"reward {figure(stage.reward)}")
    if stage.step_seconds:
        parts.append(pace(stage.step_seconds))
    if stage.eta is not None:
        parts.append(f"ETA {duration(stage.eta)}")
    if stage.warning:
        parts.append(f"warning: {stage.warning}")
    return ", ".join(parts)


def table(facts: RunFacts) -> RenderableType:
    """The stages of a run, a row each."""
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    rows = Table(box=None, pad_edge=False, header_style="bold", expand=False)
    for name in ("stage", "status", "attempt", "progress", "reward", "rate", "ETA", "elapsed"):
        rows.add_column(name, no_wrap=name != "status", justify="left" if name in _LEFT else "right")
    for stage in facts.stages:
        status = "re-used" if stage.reused_from else stage.status
        rows.add_row(
            with_values(stage.name, stage.values),
            Text(status, style=STYLES.get(stage.status, "")),
            str(stage.attempt) if stage.attempt else "-",
            _bar(stage),
            figure(stage.reward),
            pace(stage.step_seconds),
            duration(stage.eta) if stage.status == "running" else "-",
            duration(stage.elapsed),
        )
    head = Text.assemble(
        "run ",
        (facts.run_id, "bold"),
        "  ",
        (facts.status, STYLES.get(facts.status, "")),
        f"  {duration(facts.elapsed)}",
    )
    warnings = [
        Text(f"{stage.name}: {stage.warning}", style="yellow")
        for stage in facts.stages
        if stage.warning and stage.status == "running"
    ]
    return Group(head, rows, *warnings)


_LEFT = ("stage", "status", "progress")


def _bar(stage: StageFacts) -> RenderableType:
    from rich.text import Text

    if stage.done is None or stage.status == "waiting":
        return Text(stage.phase if stage.status == "running" else "", style="dim")
    if not stage.total:
        return Text(f"{stage.done} {stage.unit}s")
    full = round(_BAR_WIDTH * min(max(stage.done / stage.total, 0.0), 1.0))
    text = Text.assemble(("━" * full, "cyan"), ("─" * (_BAR_WIDTH - full), "dim"), f" {stage.done}/{stage.total}")
    if stage.status == "running" and stage.phase not in ("", "training"):
        text.append(f" {stage.phase}", style="dim")
    return text
