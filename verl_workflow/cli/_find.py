"""The run or the name a user means."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from typing import TYPE_CHECKING

from verl_workflow.cli import _options

if TYPE_CHECKING:
    from verl_workflow.storage import Store
    from verl_workflow.workflow import RunState


def find_run(storage: str | None, run_id: str, *, any_kind: bool = False) -> tuple[Store, RunState]:
    """The storage asked for, and the run's state in it.

    Args:
        any_kind: workflows too, of which the commands for pipelines know nothing.

    Raises:
        UserError: RUN_UNKNOWN or RUN_ID_INVALID; USAGE_INVALID, it is a workflow. Nothing has been written, the
            storage's folder included.
    """
    from verl_workflow.errors import ErrorCode, UserError
    from verl_workflow.storage import Store
    from verl_workflow.workflow import read_run

    store = Store(_options.storage_of(storage))
    state = read_run(store, run_id)
    if "workflow" in state.definition and not any_kind:
        raise UserError(
            ErrorCode.USAGE_INVALID,
            "this is a workflow, not the run of a pipeline",
            where=store.uri,
            value=run_id,
            remedy=f"Use ray-workflow: ray-workflow status {run_id}",
        )
    return store, state


def near(word: str, known: Iterable[str]) -> str:
    """A question that names the known word next to `word`, or an empty text."""
    found = difflib.get_close_matches(word, list(known), n=1)
    return f"Did you mean {found[0]!r}?" if found else ""
