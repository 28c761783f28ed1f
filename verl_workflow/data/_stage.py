"""The data stage: any source -> verl's parquet, train and validation, and a file of the rows that were refused."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from verl_workflow.artifacts import Artifact
from verl_workflow.data._collect import Spill, Tally, collect
from verl_workflow.data._read import check_gym, expand, file_fragments, gym_fragments, no_rows, stream
from verl_workflow.data._reward import try_reward
from verl_workflow.data._rows import Converter, Recipe
from verl_workflow.data._write import extra_types, verl_row, write_split
from verl_workflow.errors import ErrorCode, UserError

if TYPE_CHECKING:
    from verl_workflow.pipeline import StageContext
    from verl_workflow.spec import DataStage, Source

# A generator that has not made enough distinct questions after so many times the number asked for has no more.
_DRAWS = 20


def run_data_stage(spec: DataStage, ctx: StageContext) -> dict[str, Any]:
    """Read, check, split and write the rows of a data stage.

    Rows are read and converted by Ray Data's workers in source order; the rows kept pass through a file, so neither
    the source nor the result is ever held in memory (32 bytes a question are). Row numbers in messages count from 1 in
    files (the line, for JSON lines) and from 0 in reasoning-gym.

    Returns:
        ``train``, ``validation``, ``rejected`` (artifacts as JSON with ``rows``; `rejected` is None when there are
        none) and ``rows``, the three counts.

    Guarantees:
        The same rows and spec give the same bytes, wherever the files lie. Questions are distinct: a chat that occurred
        before is rejected as a duplicate (from a generator, another is drawn instead, so that `size` counts distinct
        questions). When `validation` is a number, the questions whose digests are the smallest are held out: a sample
        that depends on the questions alone, not on their order. No question is in both splits. Rows keep their source
        order in each.

    Raises:
        UserError: FILE_MISSING, DATA_INVALID (damaged source, too many rejected rows, too few rows), REWARD_INVALID or
            DEPENDENCY_MISSING.
    """
    folder = ctx.attempt_dir
    folder.mkdir(parents=True, exist_ok=True)
    refused = folder / "rejected.jsonl"
    tally = Tally()
    train, held = Spill(folder / "train.spill"), Spill(folder / "validation.spill")
    try:
        for spill in (train, held):
            spill.path.write_bytes(b"")
        with refused.open("w", encoding="utf-8") as rejected:
            if not isinstance(spec.validation, int):
                _gather(spec, spec.validation, ctx, held, rejected, tally, {})
            _gather(spec, spec.source, ctx, train, rejected, tally, held.questions)
        tally.check(spec.max_rejected, refused)
        outputs = _write(spec, ctx, train, held)
    finally:
        for spill in (train, held):
            spill.path.unlink(missing_ok=True)
    if tally.rejected:
        outputs["rejected"] = {**Artifact.of(refused).to_json(), "rows": tally.rejected}
    else:
        refused.unlink()
        outputs["rejected"] = None
    outputs["rows"] = {
        "train": outputs["train"]["rows"],
        "validation": outputs["validation"]["rows"],
        "rejected": tally.rejected,
    }
    ctx.report({"rows": tally.seen, **outputs["rows"]})
    return outputs


def _gather(
    spec: DataStage,
    source: Source,
    ctx: StageContext,
    spill: Spill,
    rejected: IO[str],
    tally: Tally,
    held_out: Mapping[bytes, None],
) -> None:
    gym = source.reasoning_gym
    recipe = Recipe(prompt=spec.prompt, answer=spec.answer, data_source=spec.data_source, system=spec.system)
    if gym is None:
        format = "parquet" if source.parquet is not None else "jsonl"
        named = source.parquet if source.parquet is not None else source.jsonl
        files = expand(_paths(named, ctx), ctx.code_dir)
        fragments = [fragment for file in files for fragment in file_fragments(format, file)]
        seen = collect(
            stream(fragments, Converter(recipe)),
            spill,
            rejected,
            tally,
            held_out=held_out,
            drawn=None,
            report=ctx.report,
        )
        for file in files:
            if str(file) not in seen:
                raise no_rows(file)
        return
    check_gym(gym.dataset, gym.config, gym.seed)
    converter = Converter(replace(recipe, prompt=recipe.prompt or "{{ question }}", answer=recipe.answer or "answer"))
    for round_ in range(_DRAWS):
        fragments = gym_fragments(gym.dataset, gym.config, gym.seed, round_ * gym.size, (round_ + 1) * gym.size)
        collect(
            stream(fragments, converter),
            spill,
            rejected,
            tally,
            held_out=held_out,
            drawn=gym.size,
            report=ctx.report,
        )
        if len(spill) >= gym.size:
            return
    raise UserError(
        ErrorCode.DATA_INVALID,
        f"reasoning-gym's {gym.dataset} made {len(spill)} distinct questions in {_DRAWS * gym.size} draws",
        where="source.reasoning_gym.size",
        value=gym.size,
        remedy="Ask for fewer, or widen its config.",
    )


def _paths(named: str | Sequence[str] | None, ctx: StageContext) -> list[str]:
    """Paths and globs behind literal names and references; a reference may hold a path, an artifact or a list."""
    found: list[str] = []
    for entry in [named] if isinstance(named, str) else named or []:
        value = ctx.value(entry)
        for item in value if isinstance(value, list) else [value]:
            if isinstance(item, Mapping) and "path" in item:
                item = ctx.artifact(entry).path if item is value else item["path"]
            if not isinstance(item, (str, Path)):
                raise UserError(
                    ErrorCode.DATA_INVALID,
                    f"{entry} holds neither a path nor an artifact",
                    where="source",
                    value=item,
                    remedy="Refer to an output that is a file, such as ${prepare.train}.",
                )
            found.append(str(item))
    return found


def _write(spec: DataStage, ctx: StageContext, train: Spill, held: Spill) -> dict[str, Any]:
    wanted = spec.validation
    splits: dict[str, Callable[[], Iterable[Mapping[str, Any]]]]
    if isinstance(wanted, int):
        _check_enough(len(train), wanted)
        chosen = set(heapq.nsmallest(wanted, train.questions))
        splits = {
            "train": lambda: (row for key, row in train.rows() if key not in chosen),
            "validation": lambda: (row for key, row in train.rows() if key in chosen),
        }
    else:
        _check_enough(min(len(train), len(held)), 0)
        splits = {
            "train": lambda: (row for _, row in train.rows()),
            "validation": lambda: (row for _, row in held.rows()),
        }
    # Both files get the same fields, as verl may concatenate them.
    extra = extra_types(row["extra_info"] for spill in (train, held) for _, row in spill.rows())
    if spec.reward is not None:
        first = next(iter(splits["train"]()))
        try_reward(spec.reward, ctx.code_dir, verl_row(first, "train", 0, extra))
    outputs: dict[str, Any] = {}
    for split, rows in splits.items():
        path = ctx.attempt_dir / f"{split}.parquet"
        count = write_split(path, split, rows(), extra)
        outputs[split] = {**Artifact.of(path).to_json(), "rows": count}
    return outputs


def _check_enough(found: int, validation: int) -> None:
    if found <= validation:
        raise UserError(
            ErrorCode.DATA_INVALID,
            f"{found} distinct rows are left, too few to hold out {validation} and train on the rest"
            if validation
            else "a split has no rows",
            where="validation",
            value=validation or None,
            remedy="Give more rows, or hold out fewer.",
        )
