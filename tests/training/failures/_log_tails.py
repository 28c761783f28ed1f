"""How the logs of trainings end when something is wrong: shortened, and otherwise as their authors print them.

``logs/<class>.txt`` holds those of a class, each below a line ``### its name``, with ``(preempted)`` behind the name
where a node was taken away on notice, and ``(at start)`` where no step was trained.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_HERE = Path(__file__).parent
_NAME = re.compile(r"^### (.+?)(?: \((preempted|at start)\))?\n", re.MULTILINE)


@dataclass(frozen=True, kw_only=True)
class Tail:
    name: str
    kind: str
    text: str
    preempted: bool
    at_start: bool


# The configuration and the warnings that verl prints at each start: full of words that are no failure.
START = (
    (_HERE / "healthy_start.txt").read_text()
    + """\
(TaskRunnerV1 pid=811) Checkpoint tracker file does not exist: /runs/n/checkpoints/latest_iteration
(WorkerDict pid=903) NCCL version 2.27.5+cuda12.9
(WorkerDict pid=903) FSDP param_offload is False, reduce the micro batch if you run out of memory
"""
)
HEALTHY = (
    START
    + """\
(TaskRunnerV1 pid=811) step:41 - actor/pg_loss:0.013 - actor/grad_norm:0.62 - critic/score/mean:0.41
(TaskRunnerV1 pid=811) step:42 - actor/pg_loss:0.011 - actor/grad_norm:0.58 - critic/score/mean:0.44
"""
)


def _read() -> Iterator[Tail]:
    for path in sorted((_HERE / "logs").glob("*.txt")):
        _, *parts = _NAME.split(path.read_text(encoding="utf-8"))
        for name, flag, text in zip(parts[::3], parts[1::3], parts[2::3], strict=True):
            kind = path.name.removesuffix(".txt")
            yield Tail(
                name=name,
                kind=kind,
                text=text.strip("\n") + "\n",
                preempted=flag == "preempted",
                at_start=flag == "at start",
            )


TAILS = tuple(_read())
