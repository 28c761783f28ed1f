"""One row of a source -> one row for verl, or the reason why not. Runs inside Ray Data's workers."""

from __future__ import annotations

import enum
import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from verl_workflow.errors import ErrorCode, UserError
from verl_workflow.spec._template import compiled

ROLES = frozenset({"system", "user", "assistant", "tool"})

# Columns of these names overwrite what verl's trainer keeps for each answer under the same names.
RESERVED = frozenset(
    {
        "responses", "prompts", "response_mask", "rollout_log_probs", "rm_scores", "num_turns", "metrics",
        "extra_fields", "trace", "trajectory", "session_id", "sampling_params", "uid", "raw_prompt", "global_steps",
    }
)  # fmt: skip


class Reason(str, enum.Enum):
    """Why a row was rejected; written to ``rejected.jsonl``."""

    NULL_PROMPT = "null_prompt"
    PROMPT_IS_STRING = "prompt_is_string"
    PROMPT_MALFORMED = "prompt_malformed"
    EMPTY_CONTENT = "empty_content"
    UNKNOWN_ROLE = "unknown_role"
    TEMPLATE = "template"
    MISSING_ANSWER = "missing_answer"
    RESERVED_COLUMN = "reserved_column"
    DUPLICATE = "duplicate"
    HELD_OUT = "held_out"


class Status(str, enum.Enum):
    KEPT = "kept"
    REJECTED = "rejected"
    # The source itself is damaged: the stage fails, however many rows may be rejected.
    BROKEN = "broken"


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """How rows are understood; the fields are those of `DataStage`.

    Rows without a data source get `data_source`, or the name of their source when that is None.
    """

    prompt: str | None
    answer: str | None
    data_source: str | None
    system: str | None


class _Rejected(Exception):
    def __init__(self, reason: Reason, detail: str) -> None:
        self.reason = reason
        self.detail = detail


class Converter:
    """Turns what the readers yield into records of plain columns; picklable.

    A record has ``source``, ``row``, ``status``, ``reason``, ``detail``, ``question`` (a digest of the chat: equal for
    equal questions) and ``payload`` (the row for verl as JSON).

    Raises:
        UserError(DATA_INVALID): the template does not parse.
    """

    def __init__(self, recipe: Recipe) -> None:
        self.recipe = recipe
        self._template = _compiled(recipe.prompt) if recipe.prompt is not None else None

    def __reduce__(self) -> tuple[Any, ...]:
        return Converter, (self.recipe,)

    def __call__(self, item: Mapping[str, Any]) -> dict[str, Any]:
        record = {
            "source": item["source"],
            "row": item["row"],
            "status": Status.KEPT.value,
            "reason": "",
            "detail": item["broken"],
            "question": "",
            "payload": "",
        }
        if item["broken"]:
            return {**record, "status": Status.BROKEN.value}
        try:
            payload = self._payload(json.loads(item["raw"]), item["name"])
        except _Rejected as rejected:
            return {
                **record,
                "status": Status.REJECTED.value,
                "reason": rejected.reason.value,
                "detail": rejected.detail,
            }
        return {**record, "question": question_digest(payload["prompt"]), "payload": json.dumps(payload)}

    def _payload(self, row: Mapping[str, Any], name: str) -> dict[str, Any]:
        reserved = sorted(RESERVED & row.keys())
        if reserved:
            raise _Rejected(
                Reason.RESERVED_COLUMN,
                f"verl keeps its own data under {', '.join(map(repr, reserved))}: rename the column",
            )
        prompt = self._chat(row)
        extra = row.get("extra_info")
        ability = row.get("ability")
        return {
            "prompt": prompt,
            "data_source": str(row.get("data_source") or self.recipe.data_source or name),
            "ability": str(ability) if ability is not None else "",
            "style": _style(row),
            "ground_truth": self._answer(row),
            "extra_info": dict(extra) if isinstance(extra, Mapping) else {},
        }

    def _chat(self, row: Mapping[str, Any]) -> list[dict[str, str]]:
        chat = row.get("prompt")
        if isinstance(chat, list):
            messages = [_message(entry, place) for place, entry in enumerate(chat)]
            if not messages:
                raise _Rejected(Reason.EMPTY_CONTENT, "prompt is an empty chat")
        elif self._template is not None:
            messages = [{"role": "user", "content": self._rendered(row)}]
        elif chat is None:
            raise _Rejected(
                Reason.NULL_PROMPT, "prompt is null, and the stage has no template" if "prompt" in row else
                "there is no column 'prompt', and the stage has no template to make one"
            )  # fmt: skip
        elif isinstance(chat, str):
            raise _Rejected(
                Reason.PROMPT_IS_STRING,
                "prompt is a string where verl needs a chat: set the stage's prompt to '{{ prompt }}', "
                "or store a list of {role, content}",
            )
        else:
            raise _Rejected(Reason.PROMPT_MALFORMED, f"prompt is {_kind(chat)}, not a list of {{role, content}}")
        if self.recipe.system is not None and messages[0]["role"] != "system":
            messages.insert(0, {"role": "system", "content": self.recipe.system})
        return messages

    def _rendered(self, row: Mapping[str, Any]) -> str:
        from jinja2 import TemplateError

        assert self._template is not None
        try:
            text = str(self._template.render(**row))
        except (TemplateError, TypeError, ValueError, ArithmeticError) as error:
            raise _Rejected(Reason.TEMPLATE, f"the template cannot be filled in: {error}") from error
        if not text.strip():
            raise _Rejected(Reason.EMPTY_CONTENT, "the template gives an empty message")
        return text

    def _answer(self, row: Mapping[str, Any]) -> str:
        stated = row.get("reward_model")
        value = stated.get("ground_truth") if isinstance(stated, Mapping) else None
        wanted = "reward_model.ground_truth"
        if value is None and self.recipe.answer is not None:
            value = row.get(self.recipe.answer)
            wanted = f"column {self.recipe.answer!r}"
        if value is None or (isinstance(value, str) and not value.strip()):
            remedy = "" if self.recipe.answer is not None else ": name the column that holds it in the stage's answer"
            raise _Rejected(Reason.MISSING_ANSWER, f"{wanted} has no answer{remedy}")
        return value if isinstance(value, str) else json.dumps(value)


def question_digest(prompt: list[dict[str, str]]) -> str:
    """Equal for equal chats, system message included."""
    return hashlib.sha256(json.dumps(prompt, sort_keys=True).encode()).hexdigest()


def _compiled(template: str) -> Any:
    from jinja2 import TemplateSyntaxError

    try:
        return compiled(template)
    except TemplateSyntaxError as error:
        raise UserError(
            ErrorCode.DATA_INVALID,
            f"the prompt is not a Jinja template: {error.message} (line {error.lineno})",
            where="prompt",
            value=template,
            remedy="Write columns as {{ name }}.",
        ) from error


def _message(entry: Any, place: int) -> dict[str, str]:
    if not isinstance(entry, Mapping) or "role" not in entry or "content" not in entry:
        raise _Rejected(Reason.PROMPT_MALFORMED, f"prompt[{place}] is no {{role, content}}")
    role, content = entry["role"], entry["content"]
    if role not in ROLES:
        raise _Rejected(Reason.UNKNOWN_ROLE, f"prompt[{place}].role is {role!r}, not one of {', '.join(sorted(ROLES))}")
    if content is None or (isinstance(content, str) and not content.strip()):
        raise _Rejected(Reason.EMPTY_CONTENT, f"prompt[{place}].content is empty")
    if not isinstance(content, str):
        raise _Rejected(Reason.PROMPT_MALFORMED, f"prompt[{place}].content is {_kind(content)}, not text")
    return {"role": role, "content": content}


def _style(row: Mapping[str, Any]) -> str:
    stated = row.get("reward_model")
    return str(stated["style"]) if isinstance(stated, Mapping) and stated.get("style") else "rule"


def _kind(value: Any) -> str:
    names = {dict: "an object", list: "a list", bool: "a truth value", int: "a number", float: "a number"}
    return names.get(type(value), type(value).__name__)
