from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from verl_workflow.errors import ErrorCode, UserError, UserErrors
from verl_workflow.spec._yaml import read_yaml


@pytest.fixture
def read(tmp_path: Path) -> Callable[[str], Any]:
    def call(text: str | bytes) -> Any:
        path = tmp_path / "p.yaml"
        path.write_bytes(text.encode() if isinstance(text, str) else text)
        return read_yaml(path, "p.yaml")

    return call


def test_every_value_and_key_has_its_place(read: Callable[[str], Any]) -> None:
    places = read("a: 1\nb:\n  - x\n  - c: {d: 2}\n").places
    assert places.at(("a",), key=True) == "p.yaml:1:1"
    assert places.at(("a",)) == "p.yaml:1:4"
    assert places.at(("b", 0)) == "p.yaml:3:5"
    assert places.at(("b", 1, "c", "d"), key=True) == "p.yaml:4:9"
    assert places.at(("b", 1, "c", "missing")) == "p.yaml:4:5"
    assert places.at(("nothing",)) == "p.yaml:1:1"


def test_dotted_keys_are_found_by_their_parts(read: Callable[[str], Any]) -> None:
    places = read("o:\n  a.b.c: 1\n  a:\n    d.e: 2\n").places
    assert places.at(("o", "a", "b", "c")) == "p.yaml:2:10"
    assert places.at(("o", "a", "d", "e"), key=True) == "p.yaml:4:5"


def test_scalars_follow_yaml_1_2(read: Callable[[str], Any]) -> None:
    data = read(
        "a: 1e-6\nb: no\nc: 1:30\nd: 2026-01-01\ne: 0x10\nf: 010\ng: ~\nh: 'true'\ni: True\nj: -.inf\nk: 0o17\n"
        "l: 1_000\nm: =\nn: !!str 5\no:\np: .5\nq: é\n"
    ).data
    assert data == {
        "a": 1e-6,
        "b": "no",
        "c": "1:30",
        "d": "2026-01-01",
        "e": 16,
        "f": 10,
        "g": None,
        "h": "true",
        "i": True,
        "j": float("-inf"),
        "k": 15,
        "l": "1_000",
        "m": "=",
        "n": "5",
        "o": None,
        "p": 0.5,
        "q": "é",
    }


def test_anchors_and_merges_are_understood(read: Callable[[str], Any]) -> None:
    marked = read("base: &b {x: 1, y: 2}\nsame: *b\nmore:\n  <<: *b\n  y: 3\nmany:\n  <<: [*b, {x: 9, z: 4}]\n")
    assert marked.data["same"] == {"x": 1, "y": 2}
    assert marked.data["more"] == {"x": 1, "y": 3}
    assert marked.data["many"] == {"x": 1, "y": 2, "z": 4}


def test_a_byte_order_mark_is_no_mistake(read: Callable[[bytes], Any]) -> None:
    assert read(b"\xef\xbb\xbfa: 1\n").data == {"a": 1}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: 1\nb:\n\tc: 2\n", r"^p\.yaml:3:1: a tab cannot indent in YAML. Indent with spaces"),
        ("a: [1, 2\nb: 3\n", r"^p\.yaml:2:2: this is not YAML: while parsing a flow sequence"),
        ("a: 1\n b: 2\n", r"^p\.yaml:2:3: this is not YAML"),
        ("a: 'x\n", r"^p\.yaml:2:1: this is not YAML.*quoted scalar"),
        ("a: *nowhere\n", r"^p\.yaml:1:4: .*undefined alias"),
        ("a: 1\n---\nb: 2\n", r"^p\.yaml:2:1: the file holds more than one YAML document"),
        ("a: 1\nb: \x01\n", r"^p\.yaml:2:4: the file holds a character that YAML does not allow"),
        (b"a: 1\nb: caf\xe9\n", r"^p\.yaml:2:7: the file is not UTF-8 \(got b'\\xe9'\). Save it as UTF-8"),
        ("a: !!python/object:os.system x\n", r"^p\.yaml:1:4: tags such as this are not supported"),
        ("a: !!set {x}\n", r"^p\.yaml:1:4: tags such as this are not supported"),
        ("a: !!int x\n", r"^p\.yaml:1:4: this is no int \(got 'x'\)"),
        ("a: &a [*a]\n", r"^p\.yaml:1:4: an anchor holds an alias of itself"),
        ("a: &a\n  <<: *a\n", r"`<<` merges mappings"),
        ("a: {<<: 3}\n", r"^p\.yaml:1:9: `<<` merges mappings"),
        ("[" * 3000, "the YAML is nested too deeply"),
        ("a: " + "[" * 150 + "]" * 150, r"^p\.yaml:1:104: the YAML is nested more than 100 deep"),
        ("a: {<<: &b {<<: [*b]}}\n", r"`<<` merges mappings"),
        ('a: "x\\ud800"\n', r"^p\.yaml:1:4: the text holds half a character"),
        ('a: {"\\ud83d\\ude00": 1}\n', r"^p\.yaml:1:5: the text holds half a character"),
        ("a: 0x" + "f" * 5000, r"^p\.yaml:1:4: the number has too many digits"),
        ("a: " + "9" * 5000, r"^p\.yaml:1:4: the number has too many digits"),
    ],
)
def test_what_is_no_plain_yaml_is_told_with_its_place(
    read: Callable[[str | bytes], Any], text: str | bytes, message: str
) -> None:
    with pytest.raises(UserError, match=message) as caught:
        read(text)
    assert caught.value.code is ErrorCode.SPEC_SYNTAX


def test_aliases_cannot_blow_the_file_up(read: Callable[[str], Any]) -> None:
    bomb = "a0: &a0 [x, x, x, x, x, x, x, x, x, x]\n"
    bomb += "".join(f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]\n" for n in range(1, 10))
    with pytest.raises(UserError, match="more than 100000 values"):
        read(bomb)


def test_anchors_cannot_be_nested_past_what_can_be_written(read: Callable[[str], Any]) -> None:
    chain = "a0: &a0 [x]\n" + "".join(f"a{n}: &a{n} [*a{n - 1}]\n" for n in range(1, 400))
    with pytest.raises(UserError, match="the YAML is nested more than 100 deep"):
        read(chain)


def test_merges_cannot_blow_the_file_up(read: Callable[[str], Any]) -> None:
    for content in ("{k: 1}", "{}"):
        bomb = f"a0: &a0 {content}\n"
        bomb += "".join(f"a{n}: &a{n} {{<<: [{', '.join([f'*a{n - 1}'] * 10)}]}}\n" for n in range(1, 10))
        with pytest.raises(UserError, match="more than 100000 values, aliases and merges counted each time"):
            read(bomb)


def test_merges_cannot_be_chained_without_end(read: Callable[[str], Any]) -> None:
    chain = "a0: &a0 {k: 1}\n" + "".join(f"a{n}: &a{n} {{<<: *a{n - 1}}}\n" for n in range(1, 3000))
    with pytest.raises(UserError, match="`<<` merges more than 100 mappings"):
        read(chain)
    short = "a0: &a0 {k: 1}\n" + "".join(f"a{n}: &a{n} {{<<: *a{n - 1}}}\n" for n in range(1, 50))
    assert read(short).data["a49"] == {"k": 1}


def test_keys_that_come_twice_or_are_no_text_are_all_told(read: Callable[[str], Any]) -> None:
    with pytest.raises(UserErrors) as caught:
        read("a: 1\nb: {c: 1, c: 2}\na: 2\n7: x\n[k]: y\n")
    assert [str(error) for error in caught.value.errors] == [
        "p.yaml:2:11: the key 'c' is there twice, first in line 2 (got 'c'). Keep one of them.",
        "p.yaml:3:1: the key 'a' is there twice, first in line 1 (got 'a'). Keep one of them.",
        "p.yaml:4:1: a key has to be text (got '7'). Put it in quotes.",
        "p.yaml:5:1: a key has to be text (got 'a list or mapping'). Put it in quotes.",
    ]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", r"^p\.yaml: the file is empty\. Write a pipeline"),
        ("# only a comment\n", r"^p\.yaml: the file is empty"),
        ("- a\n- b\n", r"^p\.yaml:1:1: a pipeline file holds a mapping"),
        ("just text\n", r"^p\.yaml:1:1: a pipeline file holds a mapping \(got 'just text'\)"),
    ],
)
def test_a_file_that_holds_no_mapping(read: Callable[[str], Any], text: str, message: str) -> None:
    with pytest.raises(UserError, match=message) as caught:
        read(text)
    assert caught.value.code is ErrorCode.SPEC_INVALID


def test_a_file_that_is_not_there_or_is_a_folder(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"^x\.yaml: the pipeline file does not exist") as caught:
        read_yaml(tmp_path / "x.yaml", "x.yaml")
    assert caught.value.code is ErrorCode.FILE_MISSING
    with pytest.raises(UserError, match="is a folder, not a file"):
        read_yaml(tmp_path, "here")
