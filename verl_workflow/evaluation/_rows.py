"""The frozen rows that both models answer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from verl_workflow.errors import ErrorCode, UserError

_COLUMNS = ("prompt", "data_source", "reward_model")


@dataclass(frozen=True, kw_only=True)
class Row:
    """One question, as verl hands it to a reward. `index` is its place in the file, from 0."""

    index: int
    chat: list[dict[str, str]]
    data_source: str
    ground_truth: Any
    extra_info: Mapping[str, Any]


def read_rows(path: Path, limit: int | None) -> list[Row]:
    """The first `limit` rows of the file (all when None), in its order.

    Raises:
        UserError(DATA_INVALID): it is no parquet file in verl's schema, or has no rows; the first bad row is named.
    """
    import pyarrow
    import pyarrow.parquet

    try:
        file = pyarrow.parquet.ParquetFile(path)
        names = file.schema_arrow.names
        missing = [name for name in _COLUMNS if name not in names]
        if missing:
            raise _invalid(path, f"the data has no column {', '.join(map(repr, missing))}", names)
        columns = [*_COLUMNS, *(name for name in ("extra_info",) if name in names)]
        rows: list[Row] = []
        for batch in file.iter_batches(columns=columns, batch_size=1024):
            for found in batch.to_pylist():
                if limit is not None and len(rows) == limit:
                    return rows
                rows.append(_row(path, len(rows), found))
    except (pyarrow.ArrowException, OSError) as error:
        raise _invalid(path, f"the data cannot be read as parquet: {error}", None) from error
    if not rows:
        raise _invalid(path, "the data has no rows, so nothing can be compared", None)
    return rows


def _row(path: Path, index: int, found: Mapping[str, Any]) -> Row:
    chat, reward_model = found["prompt"], found["reward_model"]
    if not isinstance(chat, list) or not chat:
        raise _invalid(path, f"row {index}: prompt is not a chat, a list of {{role, content}}", chat)
    for message in chat:
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise _invalid(path, f"row {index}: prompt has a message without a role", message)
        if not isinstance(message.get("content"), str):
            raise _invalid(path, f"row {index}: prompt has a message whose content is not text", message)
    if not isinstance(reward_model, Mapping) or reward_model.get("ground_truth") is None:
        raise _invalid(path, f"row {index}: reward_model has no ground_truth", reward_model)
    return Row(
        index=index,
        chat=[{"role": message["role"], "content": message["content"]} for message in chat],
        data_source=str(found["data_source"]),
        ground_truth=reward_model["ground_truth"],
        extra_info=found.get("extra_info") or {},
    )


def _invalid(path: Path, what: str, value: Any) -> UserError:
    return UserError(
        ErrorCode.DATA_INVALID,
        what,
        where=str(path),
        value=value,
        remedy="Evaluate on a file in verl's schema, such as a data stage's ${prepare.validation}.",
    )
