"""What the installed verl knows as a setting: keys from its YAML, types from its dataclasses, both read as text."""

from __future__ import annotations

import ast
import difflib
import functools
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from verl_workflow.verl_config._compose import base_config, verl_folder

Kinds = frozenset[str]

_SCALARS = frozenset({"bool", "int", "float", "str", "list", "dict"})
_ALIASES = {"List": "list", "ListConfig": "list", "tuple": "list", "Dict": "dict", "DictConfig": "dict"}
# Sections whose keys verl hands on to somebody else without looking at them.
_OPEN = frozenset(
    {
        "ray_kwargs.ray_init",
        "ray_kwargs.ray_init.runtime_env",
        "reward.custom_reward_function.reward_kwargs",
        "reward.reward_kwargs",
        "transfer_queue.backend.SimpleStorage",
    }
)
# Settings that are null in the YAML and have no dataclass.
_NULLS: Mapping[str, Kinds] = {
    "trainer.total_training_steps": frozenset({"int"}),
    "trainer.max_actor_ckpt_to_keep": frozenset({"int"}),
    "trainer.max_critic_ckpt_to_keep": frozenset({"int"}),
    "data.gen_batch_size": frozenset({"int"}),
    "data.val_batch_size": frozenset({"int"}),
    "data.seed": frozenset({"int"}),
}
# Whole numbers in the YAML that may be fractions.
_FRACTIONS = frozenset(
    {
        "trainer.v1.colocate_async.num_warmup_batches",
        "trainer.v1.separate_async.num_warmup_batches",
    }
)
# Settings of which verl takes one as well as a list.
_ONE_OR_SEVERAL = frozenset({"data.train_files", "data.val_files", "trainer.logger"})
_MISSING = object()


@dataclass(frozen=True, kw_only=True)
class Schema:
    """Keys and types of one engine's configuration."""

    base: Mapping[str, Any]

    def known(self, key: str) -> bool:
        """Whether verl reads the dotted key: it is in the YAML, a field of a section's class, or in an open section."""
        node: Any = self.base
        passed: list[str] = []
        for name in key.split("."):
            section = ".".join(passed)
            if not isinstance(node, Mapping) or (passed and not node) or section in _OPEN:
                # Below a leaf that is null or a plain value there is nothing known; an empty section takes anything.
                return section in _OPEN or (isinstance(node, Mapping) and not node)
            if name in node:
                node = node[name]
            elif name in _fields(str(node.get("_target_", ""))):
                return True
            else:
                return f"{section}.{name}" in _OPEN
            passed.append(name)
        return True

    def closed(self, key: str) -> bool:
        """Whether the section that would hold the key is built from a class, which refuses any other key."""
        section, _ = self._section(key)
        return "_target_" in section

    def suggestions(self, key: str) -> list[str]:
        """Known keys that may be meant, best first."""
        section, prefix = self._section(key)
        name = key[len(prefix) :].split(".")[0]
        near = difflib.get_close_matches(name, self._names(section), n=2, cutoff=0.7)
        if near:
            rest = key[len(prefix) + len(name) :]
            whole = [f"{prefix}{candidate}{rest}" for candidate in near]
            return [candidate for candidate in whole if self.known(candidate)] or [
                f"{prefix}{candidate}" for candidate in near
            ]
        leaf = key.rsplit(".", 1)[-1]
        elsewhere = [path for path in self.paths() if path.rsplit(".", 1)[-1] == leaf]
        if elsewhere or prefix:
            return elsewhere[:3]
        return difflib.get_close_matches(key, self.paths(), n=1, cutoff=0.8)

    def kinds(self, key: str) -> Kinds | None:
        """Types the value may have (``None`` among them), or None when nothing is known about it."""
        if key in _ONE_OR_SEVERAL:
            return frozenset({"str", "list"})
        section, prefix = self._section(key)
        name = key[len(prefix) :]
        if "." in name:
            return None
        value = section.get(name, _MISSING)
        declared = _fields(str(section.get("_target_", ""))).get(name)
        if declared is not None:
            return declared | _kind_of(value) if value is None else declared
        if key in _NULLS:
            return _NULLS[key] | {"None"}
        if value is _MISSING or value is None or (isinstance(value, str) and value.startswith(("${", "???"))):
            return None
        kind = _kind_of(value)
        return kind | {"float"} if key in _FRACTIONS else kind

    def paths(self) -> list[str]:
        """All dotted keys of the YAML, sections included."""
        return _paths(self.base, "")

    def _section(self, key: str) -> tuple[Mapping[str, Any], str]:
        """The deepest existing section on the way to the key, and its prefix with the final dot."""
        node: Mapping[str, Any] = self.base
        prefix = ""
        for name in key.split(".")[:-1]:
            if not isinstance(node.get(name), Mapping):
                break
            node = node[name]
            prefix += f"{name}."
        return node, prefix

    @staticmethod
    def _names(section: Mapping[str, Any]) -> list[str]:
        declared = _fields(str(section.get("_target_", "")))
        return [str(name) for name in {**dict.fromkeys(section), **dict.fromkeys(declared)} if name != "_target_"]


@functools.cache
def schema(engine: str = "dp") -> Schema:
    """The schema of the installed verl for one of its engines. Raises UserError when verl is not installed."""
    from omegaconf import OmegaConf

    return Schema(base=OmegaConf.to_container(base_config(engine), resolve=False))


def fits(value: Any, kinds: Kinds) -> bool:
    """Whether OmegaConf and verl take the value for a setting of these types."""
    if isinstance(value, str) and "${" in value:
        return True
    kind = next(iter(_kind_of(value)))
    return kind in kinds or (kind == "int" and "float" in kinds)


def _kind_of(value: Any) -> Kinds:
    if isinstance(value, Mapping):
        return frozenset({"dict"})
    if isinstance(value, (list, tuple)):
        return frozenset({"list"})
    return frozenset({"None" if value is None else type(value).__name__})


def _paths(node: Mapping[str, Any], prefix: str) -> list[str]:
    found: list[str] = []
    for name, value in node.items():
        if name != "_target_":
            found.append(f"{prefix}{name}")
            if isinstance(value, Mapping):
                found += _paths(value, f"{prefix}{name}.")
    return found


@functools.cache
def _fields(target: str) -> Mapping[str, Kinds | None]:
    """Fields of the dataclass `target` (``verl.workers.config.RolloutConfig``): name -> types, None when unclear."""
    if not target:
        return {}
    module, _, name = target.rpartition(".")
    place = verl_folder().joinpath(*module.split(".")[1:])
    files = sorted(place.glob("*.py")) if place.is_dir() else [place.with_suffix(".py")]
    classes: dict[str, ast.ClassDef] = {}
    for file in files:
        classes |= {node.name: node for node in _classes(file) if node.name not in classes}
    found: dict[str, Kinds | None] = {}
    pending, seen = [name], set[str]()
    while pending:
        current = pending.pop(0)
        if current in seen or current not in classes:
            continue
        seen.add(current)
        node = classes[current]
        for statement in node.body:
            if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
                found.setdefault(statement.target.id, _kinds(statement))
        pending += [base.id for base in node.bases if isinstance(base, ast.Name)]
    return found


@functools.cache
def _classes(file: Path) -> tuple[ast.ClassDef, ...]:
    try:
        tree = ast.parse(file.read_text(encoding="utf-8"))
    except (OSError, SyntaxError):
        return ()
    return tuple(node for node in tree.body if isinstance(node, ast.ClassDef))


def _kinds(statement: ast.AnnAssign) -> Kinds | None:
    """Types that an annotation names; None for anything that is not plain scalars, lists and mappings."""
    text = ast.unparse(statement.annotation).strip("'\"")
    outer = _outer_names(ast.parse(text, mode="eval").body)
    kinds = {_ALIASES.get(name, name) for name in outer}
    if not kinds <= _SCALARS | {"None"}:
        return None
    if isinstance(statement.value, ast.Constant) and statement.value.value is None:
        kinds.add("None")
    return frozenset(kinds)


def _outer_names(node: ast.expr) -> set[str]:
    """Names of the alternatives of a type: ``Optional[list[int]]`` -> {list, None}."""
    if isinstance(node, ast.BinOp):
        return _outer_names(node.left) | _outer_names(node.right)
    if isinstance(node, ast.Constant):
        return {"None"} if node.value is None else {str(node.value)}
    if isinstance(node, ast.Subscript):
        outer = _outer_names(node.value)
        inner = node.slice.elts if isinstance(node.slice, ast.Tuple) else [node.slice]
        if outer == {"Optional"}:
            return {"None"}.union(*(_outer_names(item) for item in inner))
        if outer == {"Union"}:
            return set[str]().union(*(_outer_names(item) for item in inner))
        return outer
    if isinstance(node, ast.Attribute):
        return {node.attr}
    return {node.id} if isinstance(node, ast.Name) else {"?"}
