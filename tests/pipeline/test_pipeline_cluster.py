from __future__ import annotations

import socket

import pytest

from verl_workflow.errors import ErrorCode, VerlWorkflowError
from verl_workflow.pipeline import connect


@pytest.mark.parametrize("scheme", ["", "ray://"])
def test_a_cluster_that_is_not_there_is_told_at_once(scheme: str) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        # Bound and not listening: nobody else gets the port, and nobody answers.
        address = f"{scheme}127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(VerlWorkflowError) as caught:
            connect(address)
    assert caught.value.code is ErrorCode.CLUSTER_UNREACHABLE
    assert address in str(caught.value)
