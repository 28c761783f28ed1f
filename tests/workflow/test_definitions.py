"""Definitions of workflows that are not as they were written."""

from __future__ import annotations

from typing import Any

import pytest
from _pieces import described

from verl_workflow import workflow
from verl_workflow.errors import ErrorCode, VerlWorkflowError
from verl_workflow.storage import Store
from verl_workflow.workflow import RunStatus, create_run, list_runs

GOOD = described()["workflow"]


@pytest.mark.parametrize(
    "spoilt",
    [
        None,
        [1],
        *({name: value for name, value in GOOD.items() if name != missing} for missing in GOOD),
        {**GOOD, "graph": 5},
        {**GOOD, "metadata": [1]},
        *({**GOOD, "graph": key} for key in ("../../../etc/passwd", "runs/../x", "runs//x", "")),
    ],
)
def test_a_spoilt_one_is_told_as_damage_by_whatever_reads_it(store: Store, spoilt: Any) -> None:
    create_run(store, "bad", {"workflow": spoilt})
    create_run(store, "good", {"workflow": GOOD})
    workflow.init(storage=store.uri)
    for ask in (workflow.get_status, workflow.get_output, workflow.get_metadata, workflow.resume):
        with pytest.raises(VerlWorkflowError, match=r"runs/bad/definition\.json") as caught:
            ask("bad")
        assert caught.value.code is ErrorCode.JOURNAL_DAMAGED
    assert {state.run_id: state.status for state in list_runs(store)} == {
        "bad": RunStatus.DAMAGED,
        "good": RunStatus.PENDING,
    }
