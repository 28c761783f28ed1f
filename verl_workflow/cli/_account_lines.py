"""The account of a run's attempts in lines for people."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from verl_workflow.cli._account import total
from verl_workflow.cli._facts import RunFacts
from verl_workflow.cli._view import progress
from verl_workflow.cli._words import duration, liveness, moment

_EVIDENCE_LINES = 5


def lines_of(facts: RunFacts, accounts: Sequence[Mapping[str, Any]], advice: Sequence[str]) -> list[str]:
    """All that `explain` prints.

    Args:
        accounts: of the stages to tell of. advice: what to do next, if anything.
    """
    lines = [f"run {facts.run_id}: {facts.status} after {duration(facts.elapsed)}"]
    if not facts.ended:
        lines.append(liveness(facts))
    if not any(len(account["attempts"]) > 1 or account["error"] for account in accounts):
        lines.append(_nothing(facts))
    told = {stage.name: progress(stage) for stage in facts.stages}
    for account in accounts:
        lines += ["", f"stage {account['stage']} ({account['kind']}): {account['status']}"]
        if account["progress"] is not None and told[account["stage"]]:
            lines.append(f"  it is at {told[account['stage']]}")
        if account["missing"]:
            lines.append(f"  its files are gone ({account['missing']}): this is what the run's journal says")
        for attempt in account["attempts"]:
            lines += _attempt(attempt)
        if account["spent"] is not None:
            lines.append(f"  used: {_spent(account['spent'])}")
    costs = [account["spent"] for account in accounts if account["spent"] is not None]
    if len(costs) > 1 and len({bool(cost["gpus"]) for cost in costs}) == 1:
        lines += ["", f"used in all: {_spent(total(accounts))}"]
    if advice:
        lines += ["", "what to do:", *(f"  {line}" for line in advice)]
    return lines


def _nothing(facts: RunFacts) -> str:
    if facts.status == "succeeded":
        return "Nothing has failed, and each stage took one attempt."
    return "It was stopped before anything failed." if facts.status == "cancelled" else "Nothing has failed."


def _attempt(attempt: Mapping[str, Any]) -> list[str]:
    took = "" if attempt["seconds"] is None else f", {duration(attempt['seconds'])}"
    head = f"  attempt {attempt['attempt']}, {moment(attempt['began'])}{took}"
    if "start" in attempt and not attempt["ended"] and not attempt["reached"]:
        head += ": before its first step"
    elif "start" in attempt:
        begun = f"from step {attempt['start']}" if attempt["start"] else "from the model"
        head += f": {begun} to step {attempt['reached']}, newest whole checkpoint {attempt['saved'] or 'none'}"
    lines = [head]
    if changes := attempt.get("changes"):
        lines.append(f"    tried with {', '.join(f'{key}={value}' for key, value in changes.items())}")
    failure = attempt.get("failure")
    if failure is None:
        return [*lines, f"    {_ending(attempt)}"]
    cost = ", a preemption, which costs no attempt" if failure["preempted"] else ""
    what = failure["what"].removeprefix(f"the training failed ({failure['class']}): ")
    lines.append(f"    {failure['class']}{cost}: {what}")
    shown = [line for line in failure["evidence"] if line not in failure["what"]]
    lines += [f"      | {line}" for line in shown[:_EVIDENCE_LINES]]
    lines.append(f"    {failure['advice']}")
    if failure["what"] not in attempt["outcome"] and attempt["outcome"]:
        lines.append(f"    {_ending(attempt)}")
    return [*lines, f"    {attempt['followed']}"] if attempt["followed"] else lines


def _ending(attempt: Mapping[str, Any]) -> str:
    if attempt["running"]:
        return "it runs"
    if attempt["outcome"] == "interrupted":
        return "its process was lost, or its driver with it, and left no word of why"
    return str(attempt["outcome"])


def _spent(cost: Mapping[str, Any]) -> str:
    unit = "GPU-hours" if cost["gpus"] else "hours of training on the CPU"
    lost = f"{cost['wasted_hours']:.2f} were lost (trained again, or never saved)"
    return f"{cost['used_hours']:.2f} {unit}, of which {lost}"
