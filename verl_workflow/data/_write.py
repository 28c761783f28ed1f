"""Rows -> one parquet file in verl's schema, the same bytes for the same rows."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

_GROUP = 4096
# Set here for each row; a source's own values would contradict the file they now lie in.
_OWN = ("index", "split")


def extra_types(extras: Iterable[Mapping[str, Any]]) -> dict[str, str]:
    """Type of each field that occurs in ``extra_info``: int, float, bool or str, sorted by name.

    Integers mixed with floats become floats; any other mixture, and lists and objects (as JSON), become str, since verl
    concatenates files and needs one type a field.
    """
    kinds: dict[str, str] = {}
    for extra in extras:
        for name, value in extra.items():
            if value is None or name in _OWN:
                continue
            kind = type(value).__name__ if isinstance(value, (bool, int, float)) else "str"
            known = kinds.setdefault(name, kind)
            if known != kind:
                kinds[name] = "float" if {known, kind} == {"int", "float"} else "str"
    return dict(sorted(kinds.items()))


def write_split(path: Path, split: str, rows: Iterable[Mapping[str, Any]], extra: Mapping[str, str]) -> int:
    """Write the rows in their order and return how many there were. The file appears whole or not at all."""
    import pyarrow
    import pyarrow.parquet

    schema = _schema(extra)
    count = 0
    partial = path.with_name(path.name + ".partial")
    with pyarrow.parquet.ParquetWriter(partial, schema, compression="zstd") as writer:
        group: list[dict[str, Any]] = []
        for row in rows:
            group.append(verl_row(row, split, count, extra))
            count += 1
            if len(group) == _GROUP:
                writer.write_table(pyarrow.Table.from_pylist(group, schema=schema))
                group = []
        if group:
            writer.write_table(pyarrow.Table.from_pylist(group, schema=schema))
    partial.replace(path)
    return count


def verl_row(row: Mapping[str, Any], split: str, index: int, extra: Mapping[str, str]) -> dict[str, Any]:
    """The row as verl, and so a reward, sees it."""
    known = row["extra_info"]
    return {
        "prompt": row["prompt"],
        "data_source": row["data_source"],
        "ability": row["ability"],
        "reward_model": {"style": row["style"], "ground_truth": row["ground_truth"]},
        "extra_info": {
            "index": index,
            "split": split,
            **{name: _typed(known.get(name), kind) for name, kind in extra.items()},
        },
    }


def _typed(value: Any, kind: str) -> Any:
    if value is None:
        return None
    if kind == "float":
        return float(value)
    if kind == "str" and not isinstance(value, str):
        return json.dumps(value, sort_keys=True)
    return value


def _schema(extra: Mapping[str, str]) -> Any:
    import pyarrow as pa

    types = {"int": pa.int64(), "float": pa.float64(), "bool": pa.bool_(), "str": pa.string()}
    message = pa.struct([("role", pa.string()), ("content", pa.string())])
    fields = [("index", pa.int64()), ("split", pa.string()), *((name, types[kind]) for name, kind in extra.items())]
    return pa.schema(
        [
            ("prompt", pa.list_(message)),
            ("data_source", pa.string()),
            ("ability", pa.string()),
            ("reward_model", pa.struct([("style", pa.string()), ("ground_truth", pa.string())])),
            ("extra_info", pa.struct(fields)),
        ]
    )
