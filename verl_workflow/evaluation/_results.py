"""What each model answered to each row, as parquet."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from verl_workflow.evaluation._rows import Row
from verl_workflow.evaluation._scoring import Scored, as_number


@dataclass(frozen=True, kw_only=True)
class Answered:
    """One model's answer to one row.

    Attributes:
        prompt: as rendered by the model's own chat template.
        tokens: how many were produced. finished: it ended by itself, not at the limit.
    """

    prompt: str
    answer: str
    tokens: int
    finished: bool
    scored: Scored


def write_results(
    path: Path, rows: Sequence[Row], candidate: Sequence[Answered], champion: Sequence[Answered] | None
) -> None:
    """Write one line a row, in order; the file appears whole or not at all.

    Columns: ``row``, ``prompt``, ``data_source``, ``ground_truth`` and, for ``candidate`` and ``champion`` each,
    ``_answer``, ``_tokens``, ``_finished``, ``_score`` and one for each further key of the reward (a number, or JSON
    text). Those of the champion are null when there is none. The prompt is the candidate's.
    """
    import pyarrow as pa
    import pyarrow.parquet

    columns: dict[str, Any] = {
        "row": pa.array([row.index for row in rows], pa.int64()),
        "prompt": pa.array([each.prompt for each in candidate], pa.string()),
        "data_source": pa.array([row.data_source for row in rows], pa.string()),
        "ground_truth": pa.array([_text(row.ground_truth) for row in rows], pa.string()),
    }
    for name, answered in (("candidate", candidate), ("champion", champion)):
        lines: Sequence[Answered | None] = answered if answered is not None else [None] * len(rows)
        columns[f"{name}_answer"] = pa.array([each and each.answer for each in lines], pa.string())
        columns[f"{name}_tokens"] = pa.array([each and each.tokens for each in lines], pa.int64())
        columns[f"{name}_finished"] = pa.array([each and each.finished for each in lines], pa.bool_())
        columns[f"{name}_score"] = pa.array([each and each.scored.score for each in lines], pa.float64())
        for key in dict.fromkeys(key for each in answered or [] for key in each.scored.extra):
            columns[f"{name}_{key}"] = _column([each.scored.extra.get(key) for each in answered or []])
    partial = path.with_name(path.name + ".partial")
    pyarrow.parquet.write_table(pa.table(columns), partial, compression="zstd")
    partial.replace(path)


def _column(values: Sequence[Any]) -> Any:
    import pyarrow as pa

    numbers = [as_number(value) for value in values]
    if all(number is not None or value is None for number, value in zip(numbers, values, strict=True)):
        return pa.array(numbers, pa.float64())
    return pa.array([None if value is None else _text(value) for value in values], pa.string())


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, sort_keys=True, default=str)
