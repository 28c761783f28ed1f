"""What a run came to, in a few lines: results of each stage, why it stopped, where things lie, what to do next."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from verl_workflow.cli._facts import RunFacts, StageFacts
from verl_workflow.cli._view import first_line
from verl_workflow.cli._words import command, duration, figure, location, run_anew, short, with_values
from verl_workflow.errors import ErrorCode, VerlWorkflowError

_TRACE_LINES = 12
# A resumed run has the pipeline and the code that it was started with, and would meet the same again.
_MENDED_IN_THE_PIPELINE = frozenset(
    code.value
    for code in (
        ErrorCode.SPEC_INVALID,
        ErrorCode.PARAM_INVALID,
        ErrorCode.OVERRIDE_INVALID,
        ErrorCode.REWARD_INVALID,
        ErrorCode.GATE_INVALID,
    )
)

# What is wrong may be a file, which a resumed run reads again, or what the pipeline says of it.
_MENDED_IN_THE_DATA = frozenset({ErrorCode.DATA_INVALID.value, ErrorCode.FILE_MISSING.value})

# Classes of failure of a training: what is wrong may be the stage as it is written, or the machines.
_MENDED_EITHER_WAY = frozenset({"configuration", "data", "memory.gpu"})
_NEEDING_ANOTHER_PIPELINE = frozenset({"reward", "numeric"})


def summary(facts: RunFacts) -> list[str]:
    """The lines to print when a run has ended, or when its state is asked for."""
    lines = [f"run {facts.run_id}: {facts.status} after {duration(facts.elapsed)}"]
    names = [with_values(stage.name, stage.values) for stage in facts.stages]
    width = max(map(len, ["storage:", *names]))
    lines += [f"  {name:<{width}}  {result(stage)}" for name, stage in zip(names, facts.stages, strict=True)]
    places = {"storage:": location(facts.storage)}
    if facts.artifacts:
        places["files:"] = f"{facts.artifacts}/runs/{facts.run_id}"
    for stage in facts.stages:
        model = stage.value.get("model") if stage.kind == "promote" and isinstance(stage.value, Mapping) else None
        if isinstance(model, Mapping) and "path" in model:
            places["model:"] = str(model["path"])
    lines += [f"  {name:<{width}}  {place}" for name, place in places.items()]
    return lines


def advice(facts: RunFacts, lost: object | None = None, *, told: Collection[str] | None = None) -> list[str]:
    """What went wrong and what to do about it; empty for a run that succeeded or goes on.

    Args:
        lost: why the driver stopped without ending the run.
        told: stages whose errors `explain` has told, so that neither they nor `explain` need be named; None elsewhere.
    """
    failed = [stage for stage in facts.stages if stage.status == "failed"]
    errors = {stage.name: stage.error for stage in failed if stage.error}
    if not errors and facts.error:
        errors = {"": facts.error}
    lines = [line for name, error in errors.items() if name not in (told or ()) for line in _told(name, error)]
    if lost is not None:
        lines.append(f"error: {lost}")
    lines += [f"log: {command('logs', facts.run_id, facts.storage, '--stage', stage.name)}" for stage in failed]
    if told is None and any(stage.kind == "verl" for stage in failed):
        lines.append(f"why, and what it cost: {command('explain', facts.run_id, facts.storage)}")
    # A run that another driver has taken goes on there.
    taken = isinstance(lost, VerlWorkflowError) and lost.code is ErrorCode.FENCED
    if facts.status == "cancelled" and told is not None:
        return [*lines, f"a cancelled run cannot be resumed; start a new one{_anew(facts)}"]
    codes = {stage.error.get("code") for stage in failed if stage.error}
    classes = _classes(facts, failed)
    if codes & _MENDED_IN_THE_PIPELINE or classes & _NEEDING_ANOTHER_PIPELINE:
        lines.append(f"mend the pipeline or its code and start a new run{_anew(facts)}")
    elif codes & _MENDED_IN_THE_DATA or classes & _MENDED_EITHER_WAY:
        lines.append(f"mend the pipeline and start a new run{_anew(facts)}")
        once = (
            "once files that it names are mended"
            if codes & _MENDED_IN_THE_DATA
            else "once the machine or data is mended"
        )
        lines.append(f"or, {once}: {command('resume', facts.run_id, facts.storage)}")
    elif facts.resumable or (lost is not None and not taken):
        lines.append(f"resume with: {command('resume', facts.run_id, facts.storage)}")
    return lines


def _anew(facts: RunFacts) -> str:
    kept = "finished stages are re-used"
    return f" ({kept}): {run_anew(facts.source, facts.storage)}" if facts.source else f": {kept}"


def _classes(facts: RunFacts, failed: Sequence[StageFacts]) -> set[str]:
    """Of what trainings failed, as they recorded it."""
    if not facts.artifacts or not any(stage.kind == "verl" for stage in failed):
        return set()
    from verl_workflow.training._history import last_failure

    stages = Path(facts.artifacts) / "runs" / facts.run_id / "stages"
    failures = [last_failure(stages / stage.name) for stage in failed if stage.kind == "verl"]
    return {failure.kind.value for failure in failures if failure is not None}


def result(stage: StageFacts) -> str:
    """A stage's result in one line."""
    if stage.status == "tolerated":
        return f"failed, and the run went on without it: {first_line(stage.error or {})}"
    if stage.status != "succeeded":
        return f"{stage.status} in attempt {stage.attempt}" if stage.attempt else "not started"
    told = _TELLERS.get(stage.kind, _python)(stage.value)
    origin = f" (re-used from {stage.reused_from})" if stage.reused_from else f" ({duration(stage.elapsed)})"
    return f"{told}{origin}"


def _told(place: str, error: Mapping[str, Any]) -> list[str]:
    """An error in words; one that nobody foresaw with the traceback that leads to its cause."""
    message = str(error.get("message", ""))
    if place and not message.startswith(f"{place}:"):
        message = f"{place}: {message}"
    lines = [f"error: {message}"]
    if error.get("code") == ErrorCode.STEP_FAILED.value and error.get("traceback"):
        lines += [f"  {line}" for line in str(error["traceback"]).rstrip().splitlines()[-_TRACE_LINES:]]
    return lines


def _model(value: Any) -> str:
    return f"{value['path']}"


def _data(value: Any) -> str:
    rows = value["rows"]
    told = f"{rows['train']} rows to train on, {rows['validation']} held out, {rows['rejected']} rejected"
    return f"{told} (see {value['rejected']['path']})" if value.get("rejected") else told


def _verl(value: Any) -> str:
    reward = value["reward"]
    figures = f"{figure(reward['first'])} -> {figure(reward['last'])} (best {figure(reward['best'])})"
    warned = f", warned: {'; '.join(value['warnings'])}" if value.get("warnings") else ""
    return f"reached step {value['step']}, reward {figures}{warned}"


def _evaluate(value: Any) -> str:
    candidate, champion = value["candidate"], value.get("champion")
    against = (
        f"champion {champion.get('version') or ''} {_scores(champion)}".replace("  ", " ")
        if champion
        else "no champion yet"
    )
    return f"candidate {_scores(candidate)}, {against}, on {value['rows']} rows"


def _choose(value: Any) -> str:
    failed = sum(row.get("error") is not None for row in value["table"])
    rest = f", {failed} of which failed" if failed else ""
    values = ", ".join(f"{name} {each}" for name, each in value["values"].items())
    return f"{value['winner']} ({values}) is best of {len(value['table'])}{rest}: {figure(value['figure'])}"


def _promote(value: Any) -> str:
    if value["promoted"]:
        return f"promoted as {value['version']}: {value['reason']}"
    return f"not promoted: {value['reason']}"


def _python(value: Any) -> str:
    return short(value)


def _scores(side: Mapping[str, Any]) -> str:
    more = [
        f"{name} {figure(value)}"
        for name, value in side.items()
        if name not in {"score", "rows", "version"} and isinstance(value, (int, float))
    ]
    return figure(side["score"]) + (f" ({', '.join(more)})" if more else "")


def _guarded(teller: Callable[[Any], str]) -> Callable[[Any], str]:
    """A value of another shape (written by another version) is shown as it is."""

    def told(value: Any) -> str:
        try:
            return teller(value)
        except (KeyError, TypeError, AttributeError):
            return short(value)

    return told


_TELLERS: Mapping[str, Callable[[Any], str]] = {
    "model": _guarded(_model),
    "data": _guarded(_data),
    "verl": _guarded(_verl),
    "evaluate": _guarded(_evaluate),
    "choose": _guarded(_choose),
    "promote": _guarded(_promote),
}
