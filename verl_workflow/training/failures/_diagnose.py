"""From what a training left behind, result, exit code and log, to why it failed."""

from __future__ import annotations

import re
import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from verl_workflow.spec._failure_class import FailureClass
from verl_workflow.training.failures._advice import ADVICE
from verl_workflow.training.failures._chain import by_cause, headline, told
from verl_workflow.training.failures._failure import Failure
from verl_workflow.training.failures._log import Raised, lost_answer, plain, raised_by_user, says_something, steps
from verl_workflow.training.failures._rule import Rule
from verl_workflow.training.failures._rules import RULES

# A log's end, in lines: what came long before has been survived.
_END = 3000
_AROUND = 60
_EVIDENCE = 5
_LONGEST = 500
_STRONG = tuple(rule for rule in RULES if not rule.weak)
_WEAK = tuple(rule for rule in RULES if rule.weak)
_LOST = tuple(rule for rule in _WEAK if rule.kind is FailureClass.INFRASTRUCTURE)
_SAVING = re.compile(r"save_checkpoint|checkpoint_manager.*\bsave|in save_\w*(model|state|ckpt)|async_save")
_OF_MEMORY = frozenset({FailureClass.MEMORY_GPU, FailureClass.MEMORY_HOST})
# Each of these may be how what the user's code raised looks from the outside.
_FROM_USER = frozenset({FailureClass.CONFIGURATION, FailureClass.DATA, FailureClass.REWARD})
_PASSING = frozenset({FailureClass.CONFIGURATION, FailureClass.CANCELLED})
_SAME_BUT_FOR_NUMBERS = re.compile(r"0x[0-9a-f]+|\d+")


@dataclass(frozen=True, kw_only=True)
class _Sign:
    """A rule that matches: in which lines, the first ones first, and where: at a place of the log or in an error."""

    rule: Rule
    lines: tuple[str, ...]
    place: int = 0
    error: str = ""


def diagnose(
    *,
    result: Mapping[str, Any] | None,
    code: int,
    log: str,
    code_dir: Path,
    drained: Sequence[str] = (),
    resumed: bool = True,
) -> Failure:
    """Why a training ended without success.

    The innermost error that says anything decides. Where it may only be what followed from something else, the earliest
    line of the log that says more does: of those since the last finished step, for what came before was survived.

    Args:
        result: what the process wrote of its end, None when it wrote nothing. Its ``errors`` are a chain of errors,
            outermost first.
        code: its exit code, negative for a signal.
        log: the end of its log.
        code_dir: where the user's files lie.
        drained: nodes of the training that were being drained.
        resumed: whether it began from a checkpoint.
    """
    lines = [plain(line) for line in log.splitlines()[-_END:]]
    moves = steps(lines)
    recent = lines[moves[-1] + 1 :] if moves else lines
    chain = list(result["errors"]) if result is not None and not result.get("ok") else []
    sign = _of_chain(chain, _STRONG) or _of_log(recent, _STRONG)
    if sign is None and len(moves) > 1:
        # Lines of several processes may reach the log out of their order.
        sign = _of_log(lines[moves[-2] + 1 : moves[-1]], _STRONG)
    if sign is None:
        sign = _of_chain(chain, _WEAK) if chain else _of_the_end(recent, code)
    if (raised := _blamed(sign, raised_by_user(recent, code_dir), chain)) is None and sign is None and chain:
        raised = raised_by_user(lines, code_dir)
    if raised is not None:
        evidence = (raised.error[:_LONGEST], *_frames(lines, code_dir))
        what = f"{raised.where} raised {raised.error}"
        kind = FailureClass.REWARD
        return Failure(kind=kind, what=what[:_LONGEST], evidence=evidence, advice=ADVICE[kind])
    if sign is None and not chain:
        return _by_signal(_signal(code), _ending(code), drained)
    # An error that is not known may be what a lost process led to: answers that never came, for one.
    sign = sign or _of_log(recent, _LOST)
    if sign is None:
        what, kind = headline(chain)[:_LONGEST], FailureClass.UNKNOWN
        evidence = (what,)
        if (first := lost_answer(recent)) is not None:
            what, evidence = f"{first} (and then: {what})"[:_LONGEST], (first[:_LONGEST], what)
        return Failure(kind=kind, what=what, evidence=evidence, advice=ADVICE[kind])
    return _told(sign, chain, code, _corrected(sign, chain, recent, moved=bool(moves), resumed=resumed), drained)


def _of_chain(chain: Sequence[Mapping[str, str]], rules: Sequence[Rule]) -> _Sign | None:
    for number, piece in enumerate(by_cause(chain)):
        # What was merely being handled, a missing key most often, is no cause unless it is telling by itself.
        known = [rule for rule in rules if number == 0 or not (rule.weak and rule.kind in _PASSING)]
        for link in piece:
            text = [plain(line) for line in f"{link['type']}: {link['message']}".splitlines()]
            for rule in known:
                if rule.pattern.search("\n".join(text)):
                    return _Sign(rule=rule, lines=_alike(rule, text) or (told(link)[:_LONGEST],), error=told(link))
    return None


def _of_log(lines: Sequence[str], rules: Sequence[Rule]) -> _Sign | None:
    """The earliest line that a rule matches."""
    for place, line in enumerate(lines):
        if not says_something(line):
            continue
        for rule in rules:
            if rule.pattern.search(line):
                return _Sign(rule=rule, lines=_alike(rule, lines[place:]), place=place)
    return None


def _of_the_end(lines: Sequence[str], code: int) -> _Sign | None:
    """The first weak rule that the very end of a log shows; what kills a process is no setting."""
    end = lines[-_AROUND:]
    for rule in _WEAK:
        if code < 0 and rule.kind not in {FailureClass.INFRASTRUCTURE, FailureClass.DISK}:
            continue
        if (sign := _of_log(end, (rule,))) is not None:
            return replace(sign, place=len(lines) - len(end) + sign.place)
    return None


def _alike(rule: Rule, lines: Sequence[str]) -> tuple[str, ...]:
    """The first lines that the rule is about; what differs in numbers alone (of ranks, of processes) once."""
    found: dict[str, str] = {}
    for line in lines:
        text = line.strip()[:_LONGEST]
        if rule.pattern.search(text) and says_something(line):
            found.setdefault(_SAME_BUT_FOR_NUMBERS.sub("#", text), text)
        if len(found) == _EVIDENCE:
            break
    return tuple(found.values())


def _blamed(sign: _Sign | None, raised: Raised | None, chain: Sequence[Mapping[str, str]]) -> Raised | None:
    """What the user's code raised, if the sign is no more than what followed from it."""
    if raised is None or sign is None:
        return raised
    if any(raised.error in line or line in raised.error for line in sign.lines):
        return raised if sign.rule.kind in _FROM_USER else None
    if chain:
        return (
            raised
            if sign.rule.kind in _FROM_USER and (sign.rule.weak or sign.rule.kind is FailureClass.REWARD)
            else None
        )
    # Without a result, the end of the log is the end of the story.
    return raised if sign.rule.weak and raised.place > sign.place else None


def _frames(lines: Sequence[str], code_dir: Path) -> list[str]:
    """The frames of the user's files that led there, the last ones first."""
    frames = [line.strip() for line in lines if f'File "{code_dir}/' in line]
    return list(dict.fromkeys(reversed(frames)))[: _EVIDENCE - 1]


def _corrected(
    sign: _Sign, chain: Sequence[Mapping[str, str]], recent: Sequence[str], *, moved: bool, resumed: bool
) -> tuple[FailureClass, str]:
    """The sign's class and advice, in the light of what the training was doing."""
    kind, advice = sign.rule.kind, sign.rule.advice
    saving = _was_saving(sign, chain, recent)
    if kind in _OF_MEMORY and saving:
        return FailureClass.MEMORY_SAVE, ADVICE[FailureClass.MEMORY_SAVE]
    if kind is FailureClass.CHECKPOINT and (moved or saving):
        # The one that it resumed from has been loaded long ago.
        return FailureClass.INFRASTRUCTURE, (
            "A file of a checkpoint could not be written or read while the training ran: look at the file system of "
            "the run's storage. The next attempt resumes from the newest whole checkpoint."
        )
    if kind is FailureClass.CHECKPOINT and not resumed:
        return FailureClass.CONFIGURATION, (
            "The files of the model itself cannot be loaded: they are cut off, or of another model than their "
            "config.json says. Fetch or make the model anew, then start a new run."
        )
    if kind is FailureClass.INFRASTRUCTURE and saving and sign.rule.weak:
        advice = (
            f"{advice or ADVICE[kind]} It was lost while it saved: most often the node's memory ran out (dmesg), and "
            "then saving less (actor_rollout_ref.actor.checkpoint.save_contents) or more memory helps."
        )
    return kind, advice or ADVICE[kind]


def _was_saving(sign: _Sign, chain: Sequence[Mapping[str, str]], recent: Sequence[str]) -> bool:
    if any(_SAVING.search(link["message"]) for link in chain):
        return True
    places = [place for place, line in enumerate(recent) if sign.lines and sign.lines[0] in line]
    before = recent[max(0, places[0] - _AROUND) : places[0]] if places else recent[-_AROUND:] if chain else []
    return any(_SAVING.search(line) for line in before if says_something(line))


def _told(
    sign: _Sign,
    chain: Sequence[Mapping[str, str]],
    code: int,
    judged: tuple[FailureClass, str],
    drained: Sequence[str],
) -> Failure:
    kind, advice = judged
    evidence = list(sign.lines)
    if not chain:
        what = f"{_ending(code)}: {evidence[0]}"
    elif sign.error:
        what = sign.error
    else:
        followed = headline(chain)[:_LONGEST]
        what = f"{evidence[0]} (and then: {followed})"
        evidence = [*evidence[: _EVIDENCE - 1], followed]
    preempted = sign.rule.preempted or (kind is FailureClass.INFRASTRUCTURE and bool(drained))
    return Failure(kind=kind, what=what[:_LONGEST], evidence=tuple(evidence), advice=advice, preempted=preempted)


def _signal(code: int) -> int:
    """The signal that ended a process, 0 for none; a shell between adds 128."""
    return -code if code < 0 else code - 128 if 128 < code < 128 + signal.NSIG else 0


def _ending(code: int) -> str:
    if number := _signal(code):
        return f"the training process was killed by signal {number} ({_signal_name(number)})"
    return f"the training process ended with exit code {code} and left no result"


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return "unknown"


def _by_signal(number: int, what: str, drained: Sequence[str]) -> Failure:
    """The process says nothing, and neither does its log."""
    if number == signal.SIGBUS:
        advice = next(rule.advice for rule in RULES if rule.kind is FailureClass.MEMORY_HOST and rule.advice)
        return Failure(kind=FailureClass.MEMORY_HOST, what=what, evidence=(what,), advice=advice)
    advice = ADVICE[FailureClass.INFRASTRUCTURE]
    if number == signal.SIGKILL:
        advice += " If nobody killed it, the node's kernel may have, for want of memory: see `dmesg`."
    return Failure(
        kind=FailureClass.INFRASTRUCTURE, what=what, evidence=(what,), advice=advice, preempted=bool(drained)
    )
