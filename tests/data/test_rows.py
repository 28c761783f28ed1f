"""What one row becomes, and why it is refused. Needs no Ray."""

from __future__ import annotations

import json
import pickle
from typing import Any

import pytest

from verl_workflow.data._rows import RESERVED, Converter, Recipe
from verl_workflow.data._write import extra_types
from verl_workflow.errors import UserError


def convert(row: dict[str, Any], **recipe: Any) -> dict[str, Any]:
    settings = {"prompt": None, "answer": "answer", "data_source": None, "system": None, **recipe}
    item = {"source": "a.jsonl", "name": "sums", "row": 3, "raw": json.dumps(row), "broken": ""}
    return pickle.loads(pickle.dumps(Converter(Recipe(**settings))))(item)


def payload(row: dict[str, Any], **recipe: Any) -> dict[str, Any]:
    record = convert(row, **recipe)
    assert record["status"] == "kept", record
    return json.loads(record["payload"])


CHAT = [{"role": "user", "content": "1 + 1?"}]


def test_a_chat_in_prompt_is_kept_and_the_answer_comes_from_its_column() -> None:
    row = payload({"prompt": CHAT, "answer": 2})
    assert row["prompt"] == CHAT
    assert (row["ground_truth"], row["style"], row["data_source"]) == ("2", "rule", "sums")


def test_a_template_builds_the_message_and_system_comes_first() -> None:
    row = payload({"q": "1 + 1", "answer": "2"}, prompt="{{ q }} = ?", system="Be short.")
    assert row["prompt"] == [
        {"role": "system", "content": "Be short."},
        {"role": "user", "content": "1 + 1 = ?"},
    ]


def test_a_row_keeps_its_own_system_message_and_its_own_facts() -> None:
    chat = [{"role": "system", "content": "Mine."}, *CHAT]
    stated = {"style": "model", "ground_truth": "two"}
    row = payload(
        {"prompt": chat, "answer": "2", "reward_model": stated, "data_source": "own", "ability": "math"},
        system="Theirs.",
    )
    assert row["prompt"] == chat
    assert (row["ground_truth"], row["style"], row["data_source"], row["ability"]) == ("two", "model", "own", "math")


def test_answers_are_always_text() -> None:
    answers = [payload({"prompt": CHAT, "answer": value})["ground_truth"] for value in (7, 2.5, True, "x", [1, 2])]
    assert answers == ["7", "2.5", "true", "x", "[1, 2]"]


@pytest.mark.parametrize(
    ("row", "reason", "said"),
    [
        ({"prompt": None, "answer": "1"}, "null_prompt", "null"),
        ({"answer": "1"}, "null_prompt", "no column 'prompt'"),
        ({"prompt": "1 + 1?", "answer": "1"}, "prompt_is_string", "{{ prompt }}"),
        ({"prompt": 7, "answer": "1"}, "prompt_malformed", "a number"),
        ({"prompt": ["hi"], "answer": "1"}, "prompt_malformed", "prompt[0]"),
        ({"prompt": [], "answer": "1"}, "empty_content", "empty chat"),
        ({"prompt": [{"role": "user", "content": "  "}], "answer": "1"}, "empty_content", "prompt[0].content"),
        ({"prompt": [{"role": "user", "content": None}], "answer": "1"}, "empty_content", "prompt[0].content"),
        ({"prompt": [*CHAT, {"role": "human", "content": "x"}], "answer": "1"}, "unknown_role", "'human'"),
        ({"prompt": CHAT}, "missing_answer", "'answer'"),
        ({"prompt": CHAT, "answer": ""}, "missing_answer", "'answer'"),
        ({"prompt": CHAT, "answer": "1", "uid": 4}, "reserved_column", "'uid'"),
    ],
)
def test_a_bad_row_is_refused_with_its_reason(row: dict[str, Any], reason: str, said: str) -> None:
    record = convert(row)
    assert (record["status"], record["reason"]) == ("rejected", reason)
    assert said in record["detail"]


def test_a_template_that_names_an_absent_column_refuses_the_row() -> None:
    record = convert({"q": "x", "answer": "1"}, prompt="{{ question }}")
    assert record["reason"] == "template" and "question" in record["detail"]


def test_a_template_cannot_reach_into_python() -> None:
    assert convert({"q": "x", "answer": "1"}, prompt="{{ q.__class__.__mro__ }}")["reason"] == "template"


def test_a_template_that_does_not_parse_is_told_at_once() -> None:
    with pytest.raises(UserError, match="not a Jinja template"):
        Converter(Recipe(prompt="{{ q", answer=None, data_source="x", system=None))


def test_every_name_verl_keeps_for_itself_is_reserved() -> None:
    for name in ("responses", "prompts", "response_mask", "rm_scores", "raw_prompt", "global_steps"):
        assert name in RESERVED


def test_equal_chats_are_the_same_question_whatever_else_the_rows_say() -> None:
    one, same = convert({"prompt": CHAT, "answer": "2"}), convert({"prompt": CHAT, "answer": "3", "x": 1})
    other = convert({"prompt": CHAT, "answer": "2"}, system="s")
    assert one["question"] == same["question"] != other["question"]


def test_extra_fields_get_one_type_each() -> None:
    extras = [{"a": 1, "b": 1, "c": True, "d": {"k": 1}, "index": 9}, {"a": 2.5, "b": "x", "e": None}]
    assert extra_types(extras) == {"a": "float", "b": "str", "c": "bool", "d": "str"}
