"""Sources -> a stream of rows in source order, each with its place, through Ray Data.

Files are cut into fragments (a row group of parquet, a file of JSON lines) which workers read one by one, so nothing
holds a whole source. Damage is handed on as a row's ``broken`` text: an exception inside a worker would lose its place.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from verl_workflow.data._rows import Converter
from verl_workflow.errors import ErrorCode, UserError
from verl_workflow.spec._paths import located, matches

# Questions worth a worker of their own: importing reasoning-gym costs one several seconds.
_QUESTIONS = 1000
_BLOCKS = 64


def expand(patterns: Sequence[str], folder: Path) -> list[Path]:
    """The files behind paths and globs, those of each pattern sorted, each file once; relative ones lie in `folder`.

    Raises:
        UserError(FILE_MISSING): a pattern matches nothing.
    """
    found: dict[Path, None] = {}
    for pattern in patterns:
        files = sorted(matches(folder, pattern))
        if not files:
            full = located(folder, pattern)
            raise UserError(
                ErrorCode.FILE_MISSING,
                "the folder holds no file named by the source" if full.is_dir() else "no such data file",
                where=str(full),
                value=pattern,
                remedy="Name files or a glob such as data/*.parquet; relative paths are beside the pipeline file.",
            )
        found.update(dict.fromkeys(files))
    return list(found)


def file_fragments(format: str, file: Path) -> list[dict[str, Any]]:
    """The parts of a file that workers read one at a time.

    Raises:
        UserError(DATA_INVALID): the file is empty, or is no whole parquet file.
    """
    try:
        size = file.stat().st_size
    except OSError as error:
        raise _unreadable(file, error) from error
    if size == 0:
        raise no_rows(file)
    if format == "jsonl":
        return [{"format": format, "path": str(file), "name": _stem(file), "first": 1, "part": 0}]
    return _row_groups(file)


def gym_fragments(dataset: str, config: Mapping[str, Any], seed: int, start: int, stop: int) -> list[dict[str, Any]]:
    """Questions `start` to `stop` - 1 of a reasoning-gym data set, in a few fragments."""
    step = max(_QUESTIONS, -(-(stop - start) // 8))
    name = f"reasoning_gym/{dataset}"
    common = {
        "format": "reasoning_gym",
        "path": name,
        "name": name,
        "dataset": dataset,
        "config": json.dumps(dict(config)),
        "seed": seed,
    }
    return [{**common, "first": first, "part": min(step, stop - first)} for first in range(start, stop, step)]


def check_gym(dataset: str, config: Mapping[str, Any], seed: int) -> None:
    """Raise UserError unless reasoning-gym is installed and knows the data set and its config."""
    try:
        import reasoning_gym
        from reasoning_gym.factory import DATASETS
    except ImportError as error:
        raise UserError(
            ErrorCode.DEPENDENCY_MISSING,
            "the source needs the package reasoning-gym",
            value=dataset,
            remedy='Install it with: uv pip install "verl-workflow[examples]".',
        ) from error
    if dataset not in DATASETS:
        near = difflib.get_close_matches(dataset, DATASETS, n=1)
        raise UserError(
            ErrorCode.DATA_INVALID,
            "reasoning-gym has no such data set",
            where="source.reasoning_gym.dataset",
            value=dataset,
            remedy=f"Did you mean {near[0]!r}?" if near else "See reasoning_gym.factory.DATASETS.",
        )
    try:
        reasoning_gym.create_dataset(dataset, size=1, seed=seed, **config)
    except (TypeError, ValueError, AssertionError) as error:
        raise UserError(
            ErrorCode.DATA_INVALID,
            f"reasoning-gym refuses the config of {dataset}: {error}",
            where="source.reasoning_gym.config",
            value=dict(config),
            remedy="Correct the named setting.",
        ) from error


def stream(fragments: Sequence[Mapping[str, Any]], converter: Converter) -> Iterator[dict[str, Any]]:
    """Converted records in source order, read and converted by Ray Data's workers as the caller goes on."""
    import ray.data

    rows = ray.data.from_items(
        [{"fragment": json.dumps(dict(fragment))} for fragment in fragments],
        override_num_blocks=min(len(fragments), _BLOCKS),
    )
    rows.context.execution_options.preserve_order = True
    rows.context.enable_progress_bars = False
    yield from rows.flat_map(read_fragment).map(converter).iter_rows()


def read_fragment(item: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """The rows of one fragment, each with ``source``, its ``name``, ``row``, ``raw`` (JSON) and ``broken`` (or "")."""
    fragment = json.loads(item["fragment"])
    readers = {"parquet": _parquet_rows, "jsonl": _json_rows, "reasoning_gym": _gym_rows}
    for row in readers[fragment["format"]](fragment):
        yield {**row, "source": fragment["path"], "name": fragment["name"]}


def _row_groups(file: Path) -> list[dict[str, Any]]:
    import pyarrow
    import pyarrow.parquet

    try:
        with pyarrow.parquet.ParquetFile(file) as parquet:
            counts = [parquet.metadata.row_group(group).num_rows for group in range(parquet.num_row_groups)]
    except (pyarrow.ArrowException, OSError) as error:
        raise _unreadable(file, error) from error
    if sum(counts) == 0:
        raise no_rows(file)
    return [
        {"format": "parquet", "path": str(file), "name": _stem(file), "first": 1 + sum(counts[:group]), "part": group}
        for group in range(len(counts))
    ]


def _parquet_rows(fragment: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    import pyarrow
    import pyarrow.parquet

    row = fragment["first"]
    try:
        with pyarrow.parquet.ParquetFile(fragment["path"]) as parquet:
            for batch in parquet.iter_batches(batch_size=1024, row_groups=[fragment["part"]]):
                for values in batch.to_pylist():
                    yield _item(row, raw=json.dumps(values, default=str))
                    row += 1
    except (pyarrow.ArrowException, OSError) as error:
        yield _item(row, broken=f"the parquet file cannot be read from this row on: {_line(error)}")


def _json_rows(fragment: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    row = 0
    try:
        with Path(fragment["path"]).open("rb") as lines:
            for row, line in enumerate(lines, start=1):
                if not line.strip():
                    continue
                try:
                    values = json.loads(line)
                except ValueError as error:
                    yield _item(row, broken=f"the line is not JSON: {error}")
                    return
                if not isinstance(values, dict):
                    yield _item(row, broken=f"the line is a {type(values).__name__}, not an object")
                    return
                yield _item(row, raw=json.dumps(values))
    except OSError as error:
        yield _item(row + 1, broken=f"the file cannot be read from this line on: {_line(error)}")


def _gym_rows(fragment: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    import reasoning_gym

    first, count = fragment["first"], fragment["part"]
    questions = reasoning_gym.create_dataset(
        fragment["dataset"], size=first + count, seed=fragment["seed"], **json.loads(fragment["config"])
    )
    for row in range(first, first + count):
        try:
            entry = questions[row]
        except (ArithmeticError, LookupError, TypeError, ValueError, RuntimeError, AssertionError) as error:
            yield _item(row, broken=f"reasoning-gym failed on this question: {_line(error)}")
            return
        metadata = json.dumps(entry["metadata"], default=str, sort_keys=True)
        values = {**entry, "metadata": metadata, "extra_info": {"metadata": metadata}}
        yield _item(row, raw=json.dumps(values, default=str))


def _item(row: int, *, raw: str = "", broken: str = "") -> dict[str, Any]:
    return {"row": row, "raw": raw, "broken": broken}


def _stem(file: Path) -> str:
    return file.name.split(".", 1)[0]


def _line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]


def no_rows(file: Path) -> UserError:
    return UserError(
        ErrorCode.DATA_INVALID, "the data file has no rows", where=str(file), remedy="Fill it or leave it out."
    )


def _unreadable(file: Path, error: Exception) -> UserError:
    return UserError(
        ErrorCode.DATA_INVALID,
        f"the data file cannot be read: {_line(error)}",
        where=str(file),
        remedy="It may be truncated or of another format: write or copy it again.",
    )
