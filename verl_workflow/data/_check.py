"""What can be said of a data stage before anything runs: the first rows of files that are there, and their number."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from verl_workflow.data._read import expand, file_fragments, read_fragment
from verl_workflow.data._rows import Converter, Recipe, Status
from verl_workflow.errors import ErrorCode, UserError

if TYPE_CHECKING:
    from verl_workflow.spec import DataStage, Source

# Of each file: mistakes of form are in all rows of a file or rare, and rare ones are met when it is read.
_LOOKED_AT = 50
# Counting the lines of a larger file would be felt.
_COUNTED_BYTES = 256 * 2**20

Where = Callable[[tuple[str, ...]], str]


def check_data_stage(stage: DataStage, base_dir: Path, *, where: Where) -> list[UserError]:
    """Mistakes that the stage would meet in its source, seen without reading it whole.

    Args:
        base_dir: folder of the pipeline file. where: the place of a field in it.
    """
    try:
        errors = list(_wrong_rows(stage, base_dir))
    except UserError as error:
        return [error]
    total = source_rows(stage, base_dir)
    if total is not None and isinstance(stage.validation, int) and total <= stage.validation:
        errors.append(
            UserError(
                ErrorCode.DATA_INVALID,
                f"the source has {total} rows, too few to hold out {stage.validation} and train on the rest",
                where=where(("validation",)),
                value=stage.validation,
                remedy="Give more rows, or hold out fewer.",
            )
        )
    return errors


def training_rows(stage: DataStage, base_dir: Path) -> int | None:
    """How many rows the stage can hand on for training at most; None when that is not known yet."""
    total = source_rows(stage, base_dir)
    if total is None:
        return None
    return total - stage.validation if isinstance(stage.validation, int) else total


def source_rows(stage: DataStage, base_dir: Path) -> int | None:
    """Rows of the stage's source, those that it will reject included; None when other stages have yet to write it."""
    if stage.source.reasoning_gym is not None:
        return stage.source.reasoning_gym.size
    files = _files(stage.source, base_dir)
    if files is None or sum(file.stat().st_size for file in files) > _COUNTED_BYTES:
        return None
    if stage.source.parquet is not None:
        import pyarrow.parquet

        return sum(int(pyarrow.parquet.read_metadata(file).num_rows) for file in files)
    return sum(sum(1 for line in file.read_bytes().splitlines() if line.strip()) for file in files)


def _wrong_rows(stage: DataStage, base_dir: Path) -> Iterator[UserError]:
    """The first wrong row of each file."""
    converter = Converter(
        Recipe(prompt=stage.prompt, answer=stage.answer, data_source=stage.data_source, system=stage.system)
    )
    sources = [stage.source] if isinstance(stage.validation, int) else [stage.source, stage.validation]
    for source in sources:
        format = "parquet" if source.parquet is not None else "jsonl"
        for file in _files(source, base_dir) or []:
            items = (
                row for part in file_fragments(format, file) for row in read_fragment({"fragment": json.dumps(part)})
            )
            for record in map(converter, itertools.islice(items, _LOOKED_AT)):
                broken = record["status"] == Status.BROKEN.value
                if broken or (record["status"] == Status.REJECTED.value and stage.max_rejected == 0):
                    yield UserError(
                        ErrorCode.DATA_INVALID,
                        record["detail"],
                        where=f"{record['source']}:{record['row']}",
                        remedy="Write or copy the file again."
                        if broken
                        else "Mend the row, or allow a share of rows to be rejected with max_rejected.",
                    )
                    break


def _files(source: Source, base_dir: Path) -> list[Path] | None:
    """The source's files; None when it is no file, or one that another stage will write."""
    named = source.parquet if source.parquet is not None else source.jsonl
    names = [named] if isinstance(named, str) else named
    if not names or any("${" in name for name in names):
        return None
    return expand(names, base_dir)
