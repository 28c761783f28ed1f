"""YAML to plain data that knows where each of its nodes stands.

Scalars follow YAML 1.2's core schema, not PyYAML's 1.1: ``1e-6`` is a number, and ``no``, ``1:30`` and ``2026-01-01``
are text. Nothing but text, numbers, true/false, null, lists and mappings with text keys can come out of it.
"""

from __future__ import annotations

import re
from collections import ChainMap
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from verl_workflow.errors import ErrorCode, UserError, UserErrors
from verl_workflow.spec._fields import DEPTH, FieldPath

_NODES = 100_000
_SURROGATE = re.compile("[\ud800-\udfff]")
_TAG = "tag:yaml.org,2002:"
_RESOLVERS = (
    ("null", re.compile(r"^(?:~|null|Null|NULL|)$"), ["~", "n", "N", ""]),
    ("bool", re.compile(r"^(?:true|True|TRUE|false|False|FALSE)$"), list("tTfF")),
    ("int", re.compile(r"^(?:[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+)$"), list("-+0123456789")),
    (
        "float",
        re.compile(
            r"^(?:[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN))$"
        ),
        list("-+0123456789."),
    ),
    ("merge", re.compile(r"^<<$"), ["<"]),
)


class CoreLoader(yaml.SafeLoader):
    """Resolves plain scalars as YAML 1.2 does."""

    yaml_implicit_resolvers: dict[str, Any] = {}


class CoreDumper(yaml.SafeDumper):
    """Quotes what `CoreLoader` would take for something else than text."""

    yaml_implicit_resolvers: dict[str, Any] = {}

    def ignore_aliases(self, data: Any) -> bool:
        return True


for _name, _pattern, _first in _RESOLVERS:
    for _class in (CoreLoader, CoreDumper):
        _class.add_implicit_resolver(_TAG + _name, _pattern, _first)


@dataclass(frozen=True, kw_only=True)
class Spot:
    """Line and column, both from 1, of a value and of the key in front of it (the value's own in lists)."""

    key: tuple[int, int]
    value: tuple[int, int]


@dataclass(frozen=True, kw_only=True)
class Places:
    """Where everything in a file stands; without `spots` (a Python file) the file itself is the place."""

    file: str
    spots: Mapping[FieldPath, Spot]

    def at(self, path: FieldPath, *, key: bool = False) -> str:
        """``file:line:column`` of a value or its key; of the nearest field around it when it is not written down."""
        spot, whole = self._nearest(path)
        if spot is None:
            return self.file
        line, column = spot.key if key or not whole else spot.value
        return f"{self.file}:{line}:{column}"

    def moved(self, path: FieldPath, moved: Mapping[FieldPath, FieldPath]) -> Places:
        """The same, but that fields below `path` stand elsewhere: path from there -> place."""
        if not moved or not self.spots:
            return self
        spots = {
            (*path, *inner, *at[len(place) :]): spot
            for inner, place in moved.items()
            for at, spot in self.spots.items()
            if at[: len(place)] == place
        }
        return Places(file=self.file, spots=ChainMap(spots, dict(self.spots)))

    def _nearest(self, path: FieldPath) -> tuple[Spot | None, bool]:
        found: FieldPath = ()
        rest = path
        while rest:
            # Overrides may be written with dotted keys: the longest key that is there wins.
            for length in range(len(rest), 0, -1):
                step = rest[0] if length == 1 else ".".join(map(str, rest[:length]))
                if (*found, step) in self.spots:
                    found, rest = (*found, step), rest[length:]
                    break
            else:
                break
        return self.spots.get(found), not rest


@dataclass(frozen=True, kw_only=True)
class Marked:
    """A file's data and the places of it."""

    data: dict[str, Any]
    places: Places


def read_yaml(path: Path, label: str) -> Marked:
    """Read a mapping.

    Args:
        label: how messages name the file.

    Raises:
        UserError: FILE_MISSING, SPEC_SYNTAX (with line and column) or SPEC_INVALID when it holds no mapping.
        UserErrors: all duplicate and unusable keys.
    """
    text = _text(path, label)
    try:
        # Not through yaml.load: the nodes know where they stand.
        node = CoreLoader(text).get_single_node()
    except yaml.MarkedYAMLError as error:
        raise _syntax(label, error) from error
    except yaml.reader.ReaderError as error:
        place = _place(text, error.position)
        raise UserError(
            ErrorCode.SPEC_SYNTAX,
            "the file holds a character that YAML does not allow",
            where=f"{label}:{place[0]}:{place[1]}",
            value=chr(error.character) if isinstance(error.character, int) else error.character,
            remedy="Remove it, or write it as an escape in double quotes.",
        ) from error
    except RecursionError as error:
        raise UserError(ErrorCode.SPEC_SYNTAX, "the YAML is nested too deeply", where=label) from error
    if node is None or (isinstance(node, yaml.ScalarNode) and node.tag == _TAG + "null"):
        raise UserError(
            ErrorCode.SPEC_INVALID,
            "the file is empty",
            where=label,
            remedy="Write a pipeline (`verl-workflow init` makes one to start from).",
        )
    if not isinstance(node, yaml.MappingNode):
        line, column = _mark(node)
        raise UserError(
            ErrorCode.SPEC_INVALID,
            "a pipeline file holds a mapping",
            where=f"{label}:{line}:{column}",
            value=getattr(node, "value", None) if isinstance(node, yaml.ScalarNode) else "a list",
            remedy="Start it with `version: 1`, `name:` and `stages:`.",
        )
    reader = _Reader(label)
    data = reader.mapping(node, ())
    if reader.errors:
        raise UserErrors(reader.errors)
    spot = Spot(key=(1, 1), value=_mark(node))
    return Marked(data=data, places=Places(file=label, spots={(): spot, **reader.spots}))


def _text(path: Path, label: str) -> str:
    if path.is_dir():
        raise UserError(
            ErrorCode.FILE_MISSING,
            "the pipeline is a folder, not a file",
            where=label,
            remedy="Name the pipeline file in it.",
        )
    try:
        raw = path.read_bytes()
    except FileNotFoundError as error:
        raise UserError(
            ErrorCode.FILE_MISSING,
            "the pipeline file does not exist",
            where=label,
            remedy="Check the path (`verl-workflow init` makes a pipeline to start from).",
        ) from error
    except OSError as error:
        raise UserError(
            ErrorCode.FILE_MISSING, f"the pipeline file cannot be read: {error.strerror or error}", where=label
        ) from error
    try:
        return raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = raw.count(b"\n", 0, error.start) + 1
        column = error.start - (raw.rfind(b"\n", 0, error.start) + 1) + 1
        raise UserError(
            ErrorCode.SPEC_SYNTAX,
            "the file is not UTF-8",
            where=f"{label}:{line}:{column}",
            value=raw[error.start : error.start + 1],
            remedy="Save it as UTF-8.",
        ) from error


def _syntax(label: str, error: yaml.MarkedYAMLError) -> UserError:
    mark = error.problem_mark or error.context_mark
    where = f"{label}:{mark.line + 1}:{mark.column + 1}" if mark is not None else label
    problem = " ".join(filter(None, [error.context, error.problem]))
    if "'\\t'" in problem:
        return UserError(
            ErrorCode.SPEC_SYNTAX, "a tab cannot indent in YAML", where=where, remedy="Indent with spaces."
        )
    if "single document" in problem:
        return UserError(
            ErrorCode.SPEC_SYNTAX,
            "the file holds more than one YAML document",
            where=where,
            remedy="Keep one pipeline in a file.",
        )
    return UserError(ErrorCode.SPEC_SYNTAX, f"this is not YAML: {problem}", where=where, remedy="Mend the syntax.")


class _Reader:
    """Turns nodes into data, and notes places and mistakes."""

    def __init__(self, label: str) -> None:
        self.label = label
        self.spots: dict[FieldPath, Spot] = {}
        self.errors: list[UserError] = []
        self._open: set[int] = set()
        self._count = 0

    def value(self, node: yaml.Node, path: FieldPath) -> Any:
        self._tally(node)
        if isinstance(node, yaml.ScalarNode):
            return self._scalar(node)
        if len(path) > DEPTH:
            raise self._error(node, f"the YAML is nested more than {DEPTH} deep", None, "Write it flatter.")
        if id(node) in self._open:
            raise self._error(node, "an anchor holds an alias of itself")
        self._open.add(id(node))
        try:
            return self.mapping(node, path) if isinstance(node, yaml.MappingNode) else self._list(node, path)
        finally:
            self._open.discard(id(node))

    def mapping(self, node: yaml.MappingNode, path: FieldPath) -> dict[str, Any]:
        self._check_tag(node, "map")
        found: dict[str, Any] = {}
        seen: dict[str, int] = {}
        for key_node, value_node in self._pairs(node):
            if not isinstance(key_node, yaml.ScalarNode) or key_node.tag != _TAG + "str":
                shown = key_node.value if isinstance(key_node, yaml.ScalarNode) else "a list or mapping"
                self.errors.append(self._error(key_node, "a key has to be text", shown, "Put it in quotes."))
                continue
            key = self._text(key_node)
            merged = getattr(key_node, "merged", False)
            if key in seen:
                if not merged:
                    what = f"the key {key!r} is there twice, first in line {seen[key]}"
                    self.errors.append(self._error(key_node, what, key, "Keep one of them."))
                continue
            if not merged:
                seen[key] = _mark(key_node)[0]
            elif key in found:
                continue
            inner = (*path, key)
            self.spots[inner] = Spot(key=_mark(key_node), value=_mark(value_node))
            found[key] = self.value(value_node, inner)
        return found

    def _pairs(self, node: yaml.MappingNode, around: frozenset[int] = frozenset()) -> list[tuple[yaml.Node, yaml.Node]]:
        """Keys and values, those of merged mappings last; `around` are the mappings that this one is merged into."""
        if len(around) > DEPTH:
            raise self._error(node, f"`<<` merges more than {DEPTH} mappings one through the other")
        own = [(key, value) for key, value in node.value if key.tag != _TAG + "merge"]
        around = around | {id(node)}
        for key, value in node.value:
            if key.tag != _TAG + "merge":
                continue
            sources = value.value if isinstance(value, yaml.SequenceNode) else [value]
            for source in sources:
                self._tally(source)
                if not isinstance(source, yaml.MappingNode) or id(source) in self._open | around:
                    raise self._error(source, "`<<` merges mappings")
                for inner_key, inner_value in self._pairs(source, around):
                    self._tally(source)
                    own.append((_Merged.of(inner_key), inner_value))
        return own

    def _tally(self, node: yaml.Node) -> None:
        """Count one value; aliases and merges make many of few."""
        self._count += 1
        if self._count > _NODES:
            raise self._error(node, f"the file holds more than {_NODES} values, aliases and merges counted each time")

    def _list(self, node: yaml.Node, path: FieldPath) -> list[Any]:
        self._check_tag(node, "seq")
        found = []
        for index, item in enumerate(node.value):
            inner = (*path, index)
            self.spots[inner] = Spot(key=_mark(item), value=_mark(item))
            found.append(self.value(item, inner))
        return found

    def _scalar(self, node: yaml.ScalarNode) -> Any:
        tag = node.tag.removeprefix(_TAG)
        text = self._text(node)
        try:
            if tag in {"str", "merge"}:
                return text
            if tag == "null":
                return None
            if tag == "bool":
                return {"true": True, "false": False}[text.lower()]
            if tag == "int":
                number = int(text, 0) if text[:2] in {"0x", "0o"} else int(text)
                # A number that Python does not write in decimal cannot be told or recorded.
                str(number)
                return number
            if tag == "float":
                return float(text.lower().replace(".inf", "inf").replace(".nan", "nan"))
        except (KeyError, ValueError) as error:
            if tag == "int" and len(text) > 1000:
                raise self._error(node, "the number has too many digits", text, "Write a smaller one.") from error
            raise self._error(node, f"this is no {tag}", text, "Mend the value, or drop its tag.") from error
        raise self._error(node, "tags such as this are not supported", node.tag, "Drop the tag.")

    def _text(self, node: yaml.ScalarNode) -> str:
        text = str(node.value)
        half = _SURROGATE.search(text)
        if half is not None:
            what = "the text holds half a character (a lone UTF-16 surrogate)"
            raise self._error(node, what, half.group(), "Write the character itself, or \\U and eight digits.")
        return text

    def _check_tag(self, node: yaml.Node, tag: str) -> None:
        if node.tag != _TAG + tag:
            raise self._error(node, "tags such as this are not supported", node.tag, "Drop the tag.")

    def _error(self, node: yaml.Node, what: str, value: Any = None, remedy: str = "") -> UserError:
        line, column = _mark(node)
        where = f"{self.label}:{line}:{column}"
        return UserError(ErrorCode.SPEC_SYNTAX, what, where=where, value=value, remedy=remedy)


class _Merged(yaml.ScalarNode):
    """A key that came in by ``<<``: it yields to one that stands in the mapping itself."""

    merged = True

    @classmethod
    def of(cls, node: yaml.Node) -> yaml.Node:
        if not isinstance(node, yaml.ScalarNode):
            return node
        return cls(node.tag, node.value, node.start_mark, node.end_mark)


def _mark(node: yaml.Node) -> tuple[int, int]:
    mark = node.start_mark
    return (mark.line + 1, mark.column + 1) if mark is not None else (1, 1)


def _place(text: str, position: int) -> tuple[int, int]:
    return text.count("\n", 0, position) + 1, position - (text.rfind("\n", 0, position) + 1) + 1
