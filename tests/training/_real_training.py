"""A small training by real verl on the CPU, and its processes."""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
from _training_pieces import stage

from verl_workflow.models import make_model
from verl_workflow.spec import Model, VerlStage
from verl_workflow.warm import forked_for

REWARD = """
import os
import time


def score(data_source, solution_str, ground_truth, extra_info=None, bonus=0.0, trouble="", **_):
    if trouble and "VERL_FILE_LOGGER_PATH" in os.environ:
        if trouble == "hang":
            time.sleep(3600)
        raise KeyError(trouble)
    if not solution_str:
        return {"score": bonus, "acc": 0.0}
    right = sum(letter == ground_truth for letter in solution_str) / len(solution_str)
    digits = sum(letter.isdigit() for letter in solution_str) / len(solution_str)
    return {"score": 0.5 * digits + 0.5 * right + bonus, "acc": right}
"""


def parquet(path: Path, rows: int, seed: int) -> None:
    """Questions that ask for a digit."""
    import pyarrow as pa
    from pyarrow import parquet as pq

    digits = random.Random(seed).choices("0123456789", k=rows)
    table = [
        {
            "data_source": "repeat_digit",
            "prompt": [{"role": "user", "content": f"say {digit}"}],
            "reward_model": {"style": "rule", "ground_truth": digit},
            "extra_info": {"index": index},
        }
        for index, digit in enumerate(digits)
    ]
    pq.write_table(pa.Table.from_pylist(table), path)


def prepared(tmp_path: Path, context: Callable[..., Any], **changes: Any) -> tuple[VerlStage, Callable[..., Any]]:
    """A GRPO stage over the built-in tiny model, and what makes the context of its attempts."""
    for name, rows, seed in (("train", 64, 1), ("validation", 8, 2)):
        if not (tmp_path / f"{name}.parquet").exists():
            parquet(tmp_path / f"{name}.parquet", rows, seed)
    model = make_model(Model(builtin="tiny"), tmp_path / "models", tmp_path)
    data = {name: str(tmp_path / f"{name}.parquet") for name in ("train", "validation")}
    usual = {"reward": {"function": "reward.py:score"}, "learning_rate": 1e-3, "kl_coef": 0.0, "save_every": 1}
    spec = stage(**{"model": "${model}", **data, **usual, **changes})

    def attempt(number: int = 1, **more: Any) -> Any:
        made = context(number, model=model, **more)
        (made.code_dir / "reward.py").write_text(REWARD)
        return made

    return spec, attempt


def processes(attempt_dir: Path, name: str) -> list[psutil.Process]:
    """Processes of the attempt's training whose title has the name."""
    metrics = str(attempt_dir / "verl_metrics.jsonl")
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get("VERL_FILE_LOGGER_PATH") == metrics:
                own = psutil.Process(forked_for(process.cmdline(), process.pid) or process.pid)
                if any(name in word for word in own.cmdline()):
                    found.append(own)
        except (psutil.Error, OSError):
            continue
    return found


def at_step(step: int, action: Callable[[], None]) -> Callable[[Any], None]:
    """A reporter that does something once, when the training has finished the step."""
    done: list[int] = []

    def report(progress: Any) -> None:
        if progress.get("phase") == "training" and progress["step"] >= step and not done:
            done.append(os.getpid())
            action()

    return report
