"""How many cores a process computes with. Ray gives an actor that reserves at most one core a single thread."""

from __future__ import annotations

import os

MOST = 16
"""More threads than this slow down the models that are run on a CPU."""

ONE_THREAD_BELOW = 5_000_000
"""With fewer parameters than this the threads would wait for each other more than they compute."""


def use_cores(parameters: int, processes: int | None = None) -> int:
    """Let torch use this process's share of the machine's cores, and return how many threads that is.

    Training and generation take turns, so both are given the same cores. ``VERL_WORKFLOW_THREADS`` sets another
    number.

    Args:
        parameters: how many the model has; a tiny one gets one thread.
        processes: how many processes of this kind share the machine; by default as many as there are local ranks.
    """
    import torch

    if processes is None:
        local = os.environ.get("LOCAL_WORLD_SIZE") or os.environ.get("RAY_LOCAL_WORLD_SIZE") or "1"
        processes = int(local)
    threads = int(os.environ.get("VERL_WORKFLOW_THREADS") or 0)
    if threads < 1:
        share = len(os.sched_getaffinity(0)) // max(1, processes)
        threads = 1 if parameters < ONE_THREAD_BELOW else min(MOST, max(1, share))
    torch.set_num_threads(threads)
    return threads
