"""The evaluate stage."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from verl_workflow.artifacts import Artifact
from verl_workflow.decoding import StopReason
from verl_workflow.errors import ErrorCode, UserError, VerlWorkflowError
from verl_workflow.evaluation._figures import difference, means
from verl_workflow.evaluation._model import GreedyModel
from verl_workflow.evaluation._results import Answered, write_results
from verl_workflow.evaluation._rows import Row, read_rows
from verl_workflow.evaluation._scoring import Scorer
from verl_workflow.storage import Store

if TYPE_CHECKING:
    from verl_workflow.pipeline import StageContext
    from verl_workflow.spec import EvaluateStage

CHAMPION = "champion"


@dataclass(frozen=True, kw_only=True)
class _Opponent:
    registry: str
    version: str
    artifact: Artifact


def run_evaluate_stage(spec: EvaluateStage, ctx: StageContext) -> dict[str, Any]:
    """Let candidate and champion answer the same rows, and compare them.

    Returns:
        ``model`` (the candidate), ``candidate`` (``score``, ``rows``, the mean of each further numeric key of the
        reward, ``artifact``), ``champion`` (the same with ``version`` and ``registry``; None when there is none),
        ``difference`` (``mean``, ``low``, ``high`` of the score, 95 %; None without a champion), ``rows``, ``data``
        (the artifact answered) and ``results`` (parquet, a line for each row).

    Guarantees:
        Who is champion is looked up once in a stage of a run: a later attempt meets the same version, whatever has been
        promoted since. A candidate that is byte for byte the champion answers once. ``results.parquet`` appears whole
        or not at all.

    Raises:
        UserError: DATA_INVALID (no rows, or a prompt longer than `max_prompt_length`, never cut), REWARD_INVALID
            (both name the row) or MODEL_INVALID.
        VerlWorkflowError: an input or the champion is not what was recorded.
    """
    ctx.attempt_dir.mkdir(parents=True, exist_ok=True)
    data = _input(spec.data, ctx)
    candidate = _input(spec.model, ctx)
    rows = read_rows(data.path, spec.limit)
    opponent = _opponent(spec, ctx)
    same = opponent is not None and opponent.artifact.sha256 == candidate.sha256
    total = len(rows) * (1 if opponent is None or same else 2)
    ctx.report({"rows_done": 0, "rows": total})

    with Scorer(spec.reward, ctx.code_dir) as scorer:

        def answered(artifact: Artifact, before: int) -> list[Answered]:
            return _answer(
                spec, artifact.path, rows, scorer, lambda done: ctx.report({"rows_done": before + done, "rows": total})
            )

        mine = answered(candidate, 0)
        theirs = None
        if opponent is not None:
            theirs = mine if same else answered(opponent.artifact, len(rows))
    path = ctx.attempt_dir / "results.parquet"
    write_results(path, rows, mine, theirs)
    champion = None
    apart = None
    if opponent is not None and theirs is not None:
        champion = _figures(theirs, opponent.artifact)
        champion |= {"version": opponent.version, "registry": opponent.registry}
        apart = difference([each.scored for each in mine], [each.scored for each in theirs])
    return {
        "model": candidate.to_json(),
        "candidate": _figures(mine, candidate),
        "champion": champion,
        "difference": apart,
        "rows": len(rows),
        "data": data.to_json(),
        "results": Artifact.of(path).to_json(),
    }


def _figures(answered: Sequence[Answered], artifact: Artifact) -> dict[str, Any]:
    return {**means([each.scored for each in answered]), "rows": len(answered), "artifact": artifact.to_json()}


def _input(text: str, ctx: StageContext) -> Artifact:
    """What a reference names, seen to be unchanged; or what lies at a path, relative ones beside the user's code."""
    found = ctx.value(text)
    if isinstance(found, Mapping):
        artifact = Artifact.from_json(found)
        artifact.verify()
        return artifact
    path = Path(found).expanduser()
    return Artifact.of(path if path.is_absolute() else ctx.code_dir / path)


def _answer(
    spec: EvaluateStage, folder: Path, rows: Sequence[Row], scorer: Scorer, report: Callable[[int], None]
) -> list[Answered]:
    model = GreedyModel.load(folder)
    prompts = [model.render(row.chat) for row in rows]
    encoded = [model.encode(prompt) for prompt in prompts]
    _check_lengths(rows, encoded, spec.max_prompt_length, folder)
    answered: list[Answered] = []
    for start in range(0, len(rows), spec.batch_size):
        end = start + spec.batch_size
        decoded = model.answer(encoded[start:end], spec.max_response_length)
        texts = [model.text(each.ids) for each in decoded]
        scores = scorer.score(rows[start:end], texts)
        answered += [
            Answered(
                prompt=prompt,
                answer=text,
                tokens=len(each.ids),
                finished=each.stop_reason is StopReason.EOS,
                scored=scored,
            )
            for prompt, each, text, scored in zip(prompts[start:end], decoded, texts, scores, strict=True)
        ]
        report(len(answered))
    return answered


def _check_lengths(rows: Sequence[Row], encoded: Sequence[Sequence[int]], limit: int, folder: Path) -> None:
    long = [(row.index, len(ids)) for row, ids in zip(rows, encoded, strict=True) if len(ids) > limit]
    if not long:
        return
    index, length = long[0]
    more = f", and {len(long) - 1} more rows are too long" if len(long) > 1 else ""
    raise UserError(
        ErrorCode.DATA_INVALID,
        f"row {index}: the prompt has {length} tokens, and max_prompt_length is {limit}{more}",
        where=str(folder),
        remedy=f"Set max_prompt_length to {max(length for _, length in long)} or more, or leave such rows out.",
    )


def _opponent(spec: EvaluateStage, ctx: StageContext) -> _Opponent | None:
    """The champion, fixed by the first attempt that asked."""
    from verl_workflow.registry import Registry

    if spec.champion is None:
        return None
    store = Store(ctx.storage)
    registry = Registry(store, ctx.root)
    key = f"{ctx.records}/champions/{ctx.stage}.json"
    fixed = store.get(key)
    if fixed is None:
        current = registry.alias(spec.champion, CHAMPION)
        found = None if current is None else registry.resolve(spec.champion, current.version)
        record = {
            "registry": spec.champion,
            "version": None if found is None else found.version,
            "artifact": None if found is None else found.artifact.sha256,
        }
        store.create(key, json.dumps(record).encode())
        # Of two attempts that asked at once, one was first.
        fixed = store.get(key)
    assert fixed is not None, "it has just been written"
    record = json.loads(fixed)
    if record["version"] is None:
        return None
    version = registry.resolve(record["registry"], record["version"])
    registry.verify(version.model, version.version)
    if version.artifact.sha256 != record["artifact"]:
        raise VerlWorkflowError(
            ErrorCode.MODEL_INVALID,
            f"{version.model} {version.version} is not what it was when the evaluation began",
            where=str(version.path),
            value=version.artifact.sha256[:12],
            remedy="A version never changes: restore the registry's files, or start a new run.",
        )
    return _Opponent(registry=version.model, version=version.version, artifact=version.artifact)
