"""A picture of how a run has learnt."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from verl_workflow.errors import ErrorCode, UserError
from verl_workflow.report._curve import Learning, Points

_INCHES = (7.0, 3.6)
_DOTS_PER_INCH = 130
_MARK_COLORS = ("#dd8452", "#c44e52", "#8172b3", "#937860")


def draw(learnings: Sequence[Learning], path: Path, *, title: str) -> None:
    """Write one panel for each training to `path`; its suffix decides the format (png, svg, pdf).

    Raises:
        UserError: DEPENDENCY_MISSING without matplotlib, SPEC_INVALID for a format it cannot write, FILE_MISSING
            for a place it cannot write to.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
        from matplotlib.ticker import MaxNLocator
    except ImportError as error:
        raise UserError(
            ErrorCode.DEPENDENCY_MISSING,
            "drawing needs matplotlib",
            remedy='Install it with: uv pip install "verl-workflow[report]".',
        ) from error

    figure = Figure(figsize=(_INCHES[0], _INCHES[1] * len(learnings)), layout="constrained")
    canvas = FigureCanvasAgg(figure)
    kind = path.suffix.removeprefix(".")
    if kind not in canvas.get_supported_filetypes():
        raise UserError(
            ErrorCode.SPEC_INVALID,
            "the picture's format is not known",
            where="--output",
            value=str(path),
            remedy=f"Use one of {', '.join(sorted(canvas.get_supported_filetypes()))}.",
        )
    figure.suptitle(title, fontsize=11)
    for axes, learning in zip(figure.subplots(len(learnings), squeeze=False)[:, 0], learnings, strict=True):
        axes.plot(*_xy(learning.rewards), color="#4c72b0", marker=".", label="reward while training")
        if learning.validations:
            axes.plot(*_xy(learning.validations), color="#55a868", marker="s", ls="--", label="verl's validation")
        for number, step in enumerate(learning.resumed):
            axes.axvline(step, color="#999999", ls=":", lw=1, label=None if number else "resumed")
        for number, mark in enumerate(learning.marks):
            color = _MARK_COLORS[number % len(_MARK_COLORS)]
            axes.plot([mark.step], [mark.score], "D", color=color, label=f"{mark.label}: {mark.score:.3f}")
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.set(xlabel=f"step of {learning.stage}", ylabel="mean score")
        axes.grid(alpha=0.3)
        axes.legend(fontsize=8, loc="best")
    try:
        figure.savefig(path, dpi=_DOTS_PER_INCH)
    except OSError as error:
        raise UserError(
            ErrorCode.FILE_MISSING,
            f"the picture cannot be written: {error.strerror or error}",
            where="--output",
            value=str(path),
            remedy="Name a file in a folder that exists and can be written to.",
        ) from error


def _xy(points: Points) -> tuple[list[int], list[float]]:
    return [step for step, _ in points], [value for _, value in points]
