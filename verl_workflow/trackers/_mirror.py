"""Trackers beside a training: started with it, told when it ends, and never waited for longer than a moment."""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from verl_workflow.trackers._facts import FOLDER, Facts, keep
from verl_workflow.trackers._sender import Sender

_GRACE_SECONDS = 25.0
_EXTRAS = {"mlflow": "mlflow", "wandb": "verl", "tensorboard": "verl"}


@contextmanager
def mirrored(stage_dir: Path, facts: Facts, environment: Mapping[str, str] | None = None) -> Iterator[None]:
    """While this is held, each tracker is sent what the training writes; at its end, what is left, for 20 s at most.

    What could not be sent is sent by the next attempt, or by ``verl-workflow sync``. Costs nothing without trackers.

    Args:
        environment: of the senders; by default this process's.
    """
    if not facts.trackers:
        yield
        return
    from verl_workflow.training._process import ChildProcess

    keep(stage_dir, facts)
    senders = []
    with ExitStack() as children:
        for number, tracker in enumerate(facts.trackers):
            command = [sys.executable, "-m", "verl_workflow.trackers", str(stage_dir), str(number), str(os.getpid())]
            log = stage_dir / FOLDER / f"{number}-{tracker['kind']}.log"
            variables = dict(os.environ if environment is None else environment)
            sender = ChildProcess(command, env=variables, log=log, grace=_GRACE_SECONDS)
            senders.append(children.enter_context(sender))
        try:
            yield
        finally:
            # All at once, so that none waits for the one before.
            for sender in senders:
                sender.ask_to_end()


def behind(stage_dir: Path, facts: Facts) -> list[str]:
    """What trackers have not taken, a sentence for each that lacks something."""
    found = []
    for number, tracker in enumerate(facts.trackers):
        sender = Sender(stage_dir, facts, number)
        if left := sender.pending():
            found.append(
                f"{tracker['kind']} has not taken {len(left)} of the steps up to {left[-1].step}: `verl-workflow sync "
                f"{facts.run_id}` sends them"
            )
    return found


def missing_clients(trackers: Sequence[Mapping[str, Any]]) -> Mapping[str, str]:
    """Kinds of trackers whose client is not installed, with the extra that brings it."""
    kinds = {str(tracker["kind"]) for tracker in trackers}
    return {kind: _EXTRAS[kind] for kind in sorted(kinds) if importlib.util.find_spec(kind) is None}
