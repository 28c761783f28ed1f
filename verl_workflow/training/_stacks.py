"""What a stuck training was doing: the stacks of its processes on each node, and what Ray knows of its actors."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from verl_workflow.training._job import actors_of
from verl_workflow.warm import forked_for

# Of one process. Reading a stack stops it for a moment; a frozen one answers all the same.
_PROCESS_SECONDS = 20.0
_NODE_SECONDS = 120.0
# What py-spy writes: the process it looks at, and a line for each frame.
_TITLE = re.compile(r"Process \d+: (\S+)")
_FRAME = re.compile(r"^ +(?P<name>\S+) \((?P<file>[^():]+\.py):(?P<line>\d+)\)$", re.MULTILINE)


def keep_stacks(folder: Path, namespace: str, marker: str) -> list[Path]:
    """Write the stack of each process of the training, wherever it runs, and the state of its actors.

    Best effort, within about two minutes: what cannot be had is said in ``notes.txt``.

    Args:
        folder: made, and filled with ``<node>-<pid>-<name>.txt``, ``actors.json`` and ``notes.txt``.
        namespace: of the Ray job in which it trains.
        marker: value of the variable VERL_FILE_LOGGER_PATH, which tells the training's processes from others.
    """
    folder.mkdir(parents=True, exist_ok=True)
    notes: list[str] = []
    for node, found in _everywhere(marker, notes):
        for name, text in found.items():
            (folder / f"{node}-{name}.txt").write_text(text, encoding="utf-8")
    try:
        (folder / "actors.json").write_text(json.dumps(actors_of(namespace), indent=1, default=str), encoding="utf-8")
    except Exception as error:  # noqa: BLE001 - a head that is lost is told by whatever Ray's client raises
        notes.append(f"the actors are not known: {type(error).__name__}: {error}")
    if notes:
        (folder / "notes.txt").write_text("\n".join(notes) + "\n", encoding="utf-8")
    return sorted(path for path in folder.iterdir() if path.name not in {"notes.txt", "actors.json"})


def frames_in(stacks: Sequence[Path], code_dir: Path) -> list[str]:
    """Where processes were in the user's code: ``score (reward.py:6), in ray::RewardLoopWorker``, each place once."""
    own = {file.name for file in code_dir.rglob("*.py")}
    found: dict[str, None] = {}
    for stack in stacks:
        text = stack.read_text(encoding="utf-8", errors="replace")
        title = _TITLE.match(text)
        for match in _FRAME.finditer(text):
            if Path(match["file"]).name in own:
                found[f"{match['name']} ({match['file']}:{match['line']}), in {title[1] if title else stack.stem}"] = (
                    None
                )
    return list(found)


def stacks_here(marker: str) -> dict[str, str]:
    """Stacks of this node's processes of the training, by ``<pid>-<name>``."""
    return {f"{pid}-{name}": _stack(pid) for pid, name in _processes(marker)}


def _everywhere(marker: str, notes: list[str]) -> Iterator[tuple[str, dict[str, str]]]:
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    here = ray.get_runtime_context().get_node_id()
    yield "this-node", stacks_here(marker)
    task: Callable[..., object] = ray.remote(num_cpus=0, max_retries=0)(stacks_here).options
    asked = {}
    for node in ray.nodes():
        if node["Alive"] and node["NodeID"] != here:
            place = NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
            asked[task(scheduling_strategy=place).remote(marker)] = node["NodeManagerAddress"]  # type: ignore[attr-defined]
    ready, late = ray.wait(list(asked), num_returns=len(asked), timeout=_NODE_SECONDS) if asked else ([], [])
    for one in ready:
        try:
            yield asked[one], ray.get(one)
        except ray.exceptions.RayError as error:
            notes.append(f"{asked[one]}: {error}")
    notes.extend(f"{asked[one]} did not answer within {_NODE_SECONDS:.0f} s" for one in late)


def _processes(marker: str) -> Iterator[tuple[int, str]]:
    import psutil

    for process in psutil.process_iter():
        try:
            if process.environ().get("VERL_FILE_LOGGER_PATH") == marker:
                own = psutil.Process(forked_for(process.cmdline(), process.pid) or process.pid)
                yield own.pid, "".join(letter for letter in own.name() if letter.isalnum() or letter in "-_")
        except (psutil.Error, OSError):
            continue


def _stack(pid: int) -> str:
    program = shutil.which("py-spy") or str(Path(sys.executable).with_name("py-spy"))
    try:
        done = subprocess.run(
            [program, "dump", "--nonblocking", "--pid", str(pid)],
            capture_output=True,
            text=True,
            timeout=_PROCESS_SECONDS,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"the stack could not be read: {error}\n"
    return done.stdout or f"the stack could not be read: {done.stderr.strip()}\n"
