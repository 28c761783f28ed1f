"""What a run came to, in a few lines: results of each stage, why it stopped, where things lie, what to do next."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from verl_workflow.cli._facts import RunFacts, StageFacts
from verl_workflow.cli._words import command, duration, figure, location, short
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


def summary(facts: RunFacts) -> list[str]:
    """The lines to print when a run has ended, or when its state is asked for."""
    lines = [f"run {facts.run_id}: {facts.status} after {duration(facts.elapsed)}"]
    width = max([len("storage:"), *(len(stage.name) for stage in facts.stages)])
    for stage in facts.stages:
        lines.append(f"  {stage.name:<{width}}  {result(stage)}")
    places = {"storage:": location(facts.storage)}
    if facts.artifacts:
        places["files:"] = f"{facts.artifacts}/runs/{facts.run_id}"
    for stage in facts.stages:
        model = stage.value.get("model") if stage.kind == "promote" and isinstance(stage.value, Mapping) else None
        if isinstance(model, Mapping) and "path" in model:
            places["model:"] = str(model["path"])
    lines += [f"  {name:<{width}}  {place}" for name, place in places.items()]
    return lines


def advice(facts: RunFacts, lost: object | None = None) -> list[str]:
    """What went wrong and what to do about it; empty for a run that succeeded or goes on.

    Args:
        lost: why the driver stopped without ending the run.
    """
    failed = [stage for stage in facts.stages if stage.status == "failed"]
    lines = [line for stage in failed if stage.error for line in _told(stage.name, stage.error)]
    if not lines and facts.error:
        lines = _told("", facts.error)
    if lost is not None:
        lines.append(f"error: {lost}")
    lines += [f"log: {command('logs', facts.run_id, facts.storage, '--stage', stage.name)}" for stage in failed]
    # A run that another driver has taken goes on there.
    taken = isinstance(lost, VerlWorkflowError) and lost.code is ErrorCode.FENCED
    codes = {stage.error.get("code") for stage in failed if stage.error}
    if codes & _MENDED_IN_THE_PIPELINE:
        lines.append("mend the pipeline or its code and start a new run: finished stages are re-used")
    elif codes & _MENDED_IN_THE_DATA:
        lines.append("mend the pipeline and start a new run: finished stages are re-used")
        lines.append(f"or, once files that it names are mended: {command('resume', facts.run_id, facts.storage)}")
    elif facts.resumable or (lost is not None and not taken):
        lines.append(f"resume with: {command('resume', facts.run_id, facts.storage)}")
    return lines


def result(stage: StageFacts) -> str:
    """A stage's result in one line."""
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
    return f"reached step {value['step']}, reward {figures}"


def _evaluate(value: Any) -> str:
    candidate, champion = value["candidate"], value.get("champion")
    against = (
        f"champion {champion.get('version') or ''} {_scores(champion)}".replace("  ", " ")
        if champion
        else "no champion yet"
    )
    return f"candidate {_scores(candidate)}, {against}, on {value['rows']} rows"


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
    "promote": _guarded(_promote),
}
