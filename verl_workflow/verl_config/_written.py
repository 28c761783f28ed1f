"""Settings as people write them: overrides on a command line, a YAML file, a shell script that calls verl."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from verl_workflow.errors import ErrorCode, UserError, UserErrors

_OVERRIDE = re.compile(r"^(?:\+{0,2}|~)[A-Za-z_][\w@/-]*(?:\.[\w@-]+)*=|^~[A-Za-z_][\w.]*$")
_DOTTED = re.compile(r"^(?:\+{0,2}|~)[A-Za-z_]\w*(?:[.@][\w.@-]+)+=|^\+{0,2}model_engine=")
# What a shell puts in is known only when it runs.
_SHELL = re.compile(r"\$\(|\$\{?[A-Za-z_@*#?0-9]|`")
_UNKNOWN = "${oc.env:SHELL_VARIABLE}"


@dataclass(frozen=True, kw_only=True)
class Setting:
    """One setting.

    Attributes:
        key: dotted, with hydra's ``+``, ``++`` or ``~`` in front if it was written. where: of it, for messages.
        group: whether it chooses one of verl's config groups (``actor@actor_rollout_ref.actor=megatron_actor``).
    """

    key: str
    value: Any
    where: str
    group: bool = False


def of_overrides(words: Sequence[str]) -> list[Setting]:
    """Settings of a command line, in order.

    Raises:
        UserErrors(USAGE_INVALID): those that hydra cannot read, all at once.
    """
    found, errors = [], []
    for word in words:
        try:
            found.append(_parsed(word, word))
        except UserError as error:
            errors.append(error)
    if errors:
        raise UserErrors(errors)
    return found


def is_override(word: str) -> bool:
    """Whether a word of a command line is meant as an override, and not as a file."""
    return _OVERRIDE.match(word) is not None


def of_file(path: Path) -> list[Setting]:
    """Settings of a YAML file, or of the command in a shell script.

    Raises:
        UserError: FILE_MISSING, SPEC_SYNTAX or SPEC_INVALID, with the line; USAGE_INVALID, the script has no override.
        UserErrors: several of these.
    """
    return of_script(path) if path.suffix in {".sh", ".bash"} else of_yaml(path)


def of_yaml(path: Path) -> list[Setting]:
    """Settings of a YAML file: nested, dotted, or both; a ``defaults`` list and ``hydra`` settings are hydra's own."""
    from verl_workflow.spec._yaml import read_yaml

    marked = read_yaml(path, str(path))
    found: list[Setting] = []

    def walk(node: Mapping[str, Any], place: tuple[str | int, ...], key: str) -> None:
        for name, value in node.items():
            here, dotted = (*place, name), f"{key}.{name}" if key else name
            if not key and name in {"defaults", "hydra"}:
                continue
            if isinstance(value, Mapping) and value:
                walk(value, here, dotted)
            else:
                found.append(Setting(key=dotted, value=value, where=marked.places.at(here, key=True)))

    walk(marked.data, (), "")
    return found


def of_script(path: Path) -> list[Setting]:
    """Overrides in a shell script; what a variable stands for is taken as unknown."""
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError as error:
        raise UserError(
            ErrorCode.FILE_MISSING, "the script does not exist", where=str(path), remedy="Check the path."
        ) from error
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(
            ErrorCode.SPEC_SYNTAX, f"the script cannot be read: {error}", where=str(path), remedy="Name a text file."
        ) from error
    found, errors = [], []
    for number, word in _words(text):
        if _DOTTED.match(word):
            try:
                found.append(_parsed(word, f"{path}:{number}"))
            except UserError as error:
                errors.append(error)
    if errors:
        raise UserErrors(errors)
    if not found:
        raise UserError(
            ErrorCode.USAGE_INVALID,
            "the script holds no setting of verl's",
            where=str(path),
            remedy="Name a script that calls `python -m verl.trainer.main_ppo key=value ...`.",
        )
    return found


def _words(text: str) -> Iterator[tuple[int, str]]:
    """Words of a script with the number of their line; a line that the shell reads together with others is passed over
    when it cannot be split by itself.
    """
    for number, line in enumerate(text.splitlines(), start=1):
        try:
            words = shlex.split(line.rstrip().removesuffix("\\"), comments=True)
        except ValueError:
            continue
        for word in words:
            yield number, word.strip("()")


def _parsed(word: str, where: str) -> Setting:
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.errors import HydraException

    key, equals, value = word.partition("=")
    if (_SHELL.search(value) and not value.startswith("${")) or (_SHELL.search(value) and where != word):
        return Setting(key=key, value=_UNKNOWN, where=where)
    try:
        override = OverridesParser.create().parse_override(word)
        read = override.value()
    except HydraException as error:
        reason = next(iter(str(error).splitlines()), "")
        raise UserError(
            ErrorCode.USAGE_INVALID,
            f"this is no override that hydra can read: {reason}",
            where="" if where == word else where,
            value=word,
            remedy="Write key=value, +key=value or ~key; quote what holds spaces, commas or brackets.",
        ) from error
    if override.is_sweep_override():
        raise UserError(
            ErrorCode.USAGE_INVALID,
            "this gives several values, for which hydra would start several trainings",
            where="" if where == word else where,
            value=word,
            remedy=f"Write a list in brackets: {key}{equals}[{value}]; or sweep with a pipeline's `matrix`.",
        )
    return Setting(key=key, value=_plain(read), where=where, group="@" in key)


def _plain(value: Any) -> Any:
    """hydra's quoted strings and nested values as plain data."""
    if isinstance(value, Mapping):
        return {str(_plain(name)): _plain(item) for name, item in value.items()}
    if isinstance(value, list):
        return [_plain(item) for item in value]
    return value if isinstance(value, (bool, int, float)) or value is None else str(getattr(value, "text", value))
