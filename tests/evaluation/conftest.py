"""Models whose answers are known, rows in verl's schema, and the context of an attempt."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

REWARDS = """
import asyncio

def right(data_source, solution_str, ground_truth, extra_info=None, worth=1.0):
    hit = solution_str == ground_truth
    return {"score": worth * hit, "acc": hit, "said": solution_str, "place": extra_info["index"]}

async def right_later(data_source, solution_str, ground_truth, extra_info=None):
    await asyncio.sleep(0.01 * (5 - extra_info["index"]))
    return float(solution_str == ground_truth)

def plain(data_source, solution_str, ground_truth, extra_info=None):
    return len(solution_str)

def raises(data_source, solution_str, ground_truth, extra_info=None):
    return {"score": 1 / (extra_info["index"] - 3)}

async def raises_later(data_source, solution_str, ground_truth, extra_info=None):
    return {"score": 1 / (extra_info["index"] - 3)}

def infinite(data_source, solution_str, ground_truth, extra_info=None):
    return float("inf") if extra_info["index"] == 3 else 0.0

def nan_beside(data_source, solution_str, ground_truth, extra_info=None):
    return {"score": 0.0, "acc": float("nan") if extra_info["index"] == 3 else 0.0}

def no_score(data_source, solution_str, ground_truth, extra_info=None):
    return {"acc": 1.0} if extra_info["index"] == 3 else {"score": 1.0}

def text(data_source, solution_str, ground_truth, extra_info=None):
    return "1.0" if extra_info["index"] == 3 else 1.0

def reserved(data_source, solution_str, ground_truth, extra_info=None):
    return {"score": 1.0, "rows": 3} if extra_info["index"] == 3 else 1.0
"""


@pytest.fixture
def says(tmp_path: Path) -> Callable[[str], Path]:
    """Makes models that answer one character to everything, as often as they may."""

    def make(character: str) -> Path:
        import torch
        from transformers import AutoModelForCausalLM, AutoTokenizer

        from verl_workflow.models._tiny import write_tiny

        folder = tmp_path / f"says-{ord(character)}"
        write_tiny(folder)
        model = AutoModelForCausalLM.from_pretrained(folder)
        (token,) = AutoTokenizer.from_pretrained(folder)(character)["input_ids"]
        with torch.no_grad():
            for name, weight in model.named_parameters():
                if name.endswith(("o_proj.weight", "down_proj.weight", "lm_head.weight")):
                    weight.zero_()
            model.model.embed_tokens.weight.fill_(1.0)
            model.lm_head.weight[token] = 1.0
        model.save_pretrained(folder)
        return folder

    return make


@pytest.fixture
def rows(tmp_path: Path) -> Callable[..., Path]:
    """Writes one row for each right answer; longer questions for later rows."""

    def write(truths: Sequence[str], **columns: Any) -> Path:
        import pandas as pd

        path = tmp_path / "rows.parquet"
        table = {
            "prompt": [[{"role": "user", "content": f"question {'!' * i}"}] for i in range(len(truths))],
            "data_source": ["digits"] * len(truths),
            "reward_model": [{"style": "rule", "ground_truth": truth} for truth in truths],
            "extra_info": [{"index": i, "split": "validation"} for i in range(len(truths))],
            **columns,
        }
        pd.DataFrame({name: column for name, column in table.items() if column is not None}).to_parquet(path)
        return path

    return write


@pytest.fixture
def context(tmp_path: Path) -> Callable[..., Any]:
    from verl_workflow.pipeline import StageContext

    def make(**changes: Any) -> StageContext:
        code = tmp_path / "code"
        code.mkdir(exist_ok=True)
        (code / "reward.py").write_text(REWARDS)
        fields = {
            "run_id": "monday",
            "stage": "evaluate",
            "attempt": 1,
            "epoch": 1,
            "storage": str(tmp_path / "storage"),
            "records": f"runs/{changes.get('run_id', 'monday')}/0123456789abcdef",
            "root": tmp_path / "storage",
            "code_dir": code,
        }
        return StageContext(**{**fields, **changes})

    return make


@pytest.fixture
def stage() -> Callable[..., Any]:
    from verl_workflow.spec import EvaluateStage

    def make(
        model: Path, data: Path, reward: str = "right", kwargs: dict[str, Any] | None = None, **fields: Any
    ) -> Any:
        function = {"function": f"reward.py:{reward}", "kwargs": kwargs or {}}
        body = {"max_prompt_length": 64, "max_response_length": 1, "batch_size": 2, **fields}
        return EvaluateStage.model_validate(
            {"name": "evaluate", "model": str(model), "data": str(data), "reward": function, **body}
        )

    return make
