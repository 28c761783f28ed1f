"""Gate expressions: a small, safe part of Python's syntax that decides over figures.

Allowed are comparisons (chained ones too), ``and`` / ``or`` / ``not``, ``+ - * / // %``, names, attributes
(``candidate.score``) and keys (``candidate["format ok"]``), numbers, strings, ``True`` / ``False`` / ``None``,
``is None`` / ``is not None``, and calls of ``abs``, ``max``, ``min`` and ``round``. Nothing is ever executed as Python.
A gate is strict where a slip could promote a model: its value has to be true or false, not any number, and missing
figures, None and NaN are errors instead of quiet answers. Columns in messages count from 1 in the stripped text.
"""

from __future__ import annotations

import ast
import difflib
import math
import operator
from collections.abc import Callable, Collection, Mapping
from typing import Any

from verl_workflow.errors import ErrorCode, UserError

# What a promote stage hands to its gate.
GATE_NAMES = frozenset({"candidate", "champion", "difference", "rows"})

_LIMIT = 2000
_DEPTH = 64
_CALLS: Mapping[str, tuple[Callable[..., Any], int, int]] = {
    "abs": (abs, 1, 1),
    "max": (max, 2, 16),
    "min": (min, 2, 16),
    "round": (round, 1, 2),
}
_ARITHMETIC: Mapping[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}
_ORDER: Mapping[type[ast.cmpop], Callable[[Any, Any], bool]] = {
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
}
_GUARD = "Guard it, as in `champion is None or candidate.score > champion.score`."


def check_gate(text: str, names: Collection[str] | None = None) -> None:
    """Raise unless `text` is a gate.

    Args:
        names: the names that will have values, such as `GATE_NAMES`; None leaves names unchecked.

    Raises:
        UserError(GATE_INVALID): names the part that is wrong and its column.
    """
    body = _parse(text)
    _check_depth(text, body)
    for node in ast.walk(body):
        _check_node(text, node)
        if isinstance(node, ast.Name) and names is not None and node.id not in names and not _is_called(body, node):
            raise _unknown(text, node, node.id, sorted(names))
    _check_truth(text, body)


def evaluate_gate(text: str, values: Mapping[str, Any]) -> bool:
    """Decide.

    Args:
        values: figures by name; nested mappings are reached by attributes. A value may be None.

    Raises:
        UserError(GATE_INVALID): it is no gate, names a figure that is not there (the ones that are there are named),
            uses None or NaN as a number, or divides by zero.
    """
    check_gate(text)
    return _truth(text, _parse(text), values)


def _parse(text: str) -> ast.expr:
    if not isinstance(text, str) or not text.strip():
        raise UserError(ErrorCode.GATE_INVALID, "the gate is empty", value=text, remedy=_example())
    if len(text) > _LIMIT:
        raise UserError(
            ErrorCode.GATE_INVALID,
            f"the gate is longer than {_LIMIT} characters",
            value=text,
            remedy="Compute the figure in the reward function, and compare it here.",
        )
    try:
        # A gate may be spread over the lines of a YAML block.
        return ast.parse(text.strip().replace("\n", " "), mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        place = f" at column {error.offset}" if isinstance(error, SyntaxError) and error.offset else ""
        reason = error.msg if isinstance(error, SyntaxError) else str(error)
        raise UserError(
            ErrorCode.GATE_INVALID,
            f"the gate is not an expression{place}: {reason}",
            value=text,
            remedy=_example(),
        ) from error


def _check_depth(text: str, body: ast.expr) -> None:
    level: list[ast.AST] = [body]
    for _ in range(_DEPTH):
        level = [child for node in level for child in ast.iter_child_nodes(node)]
    if level:
        raise _error(text, body, f"the gate is nested more than {_DEPTH} levels deep", "Write it in a flatter way.")


def _check_node(text: str, node: ast.AST) -> None:
    if isinstance(node, ast.Constant):
        if not isinstance(node.value, (int, float, str, type(None))):
            raise _refused(text, node, "this literal")
    elif isinstance(node, ast.Call):
        _check_call(text, node)
    elif isinstance(node, ast.BinOp):
        if type(node.op) not in _ARITHMETIC:
            raise _refused(text, node, f"the operator {type(node.op).__name__}")
    elif isinstance(node, ast.Compare):
        _check_compare(text, node)
    elif isinstance(node, ast.UnaryOp):
        if not isinstance(node.op, (ast.Not, ast.USub, ast.UAdd)):
            raise _refused(text, node, f"the operator {type(node.op).__name__}")
    elif isinstance(node, ast.Subscript):
        if not (isinstance(node.slice, ast.Constant) and isinstance(node.slice.value, str)):
            raise _refused(text, node, "a key that is not a quoted name")
    elif isinstance(node, ast.expr) and not isinstance(node, (ast.BoolOp, ast.Name, ast.Attribute)):
        raise _refused(text, node, f"{type(node).__name__}")


def _check_call(text: str, node: ast.Call) -> None:
    name = node.func.id if isinstance(node.func, ast.Name) else ast.unparse(node.func)
    if name not in _CALLS:
        raise _refused(text, node, f"a call of {name}")
    _, least, most = _CALLS[name]
    plain = not node.keywords and not any(isinstance(argument, ast.Starred) for argument in node.args)
    if not plain or not least <= len(node.args) <= most:
        count = f"{least}" if least == most else f"{least} to {most}"
        raise _error(text, node, f"{name}() takes {count} plain arguments", f"Call it like {name}(a, b).")


def _check_compare(text: str, node: ast.Compare) -> None:
    for operation, right in zip(node.ops, node.comparators, strict=True):
        if isinstance(operation, (ast.Is, ast.IsNot)):
            if not (isinstance(right, ast.Constant) and right.value is None):
                raise _error(text, node, "`is` compares with None only", "Use == for other values.")
        elif isinstance(operation, (ast.In, ast.NotIn)):
            raise _refused(text, node, "the operator `in`")


def _check_truth(text: str, node: ast.expr) -> None:
    if isinstance(node, ast.BoolOp):
        for part in node.values:
            _check_truth(text, part)
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        _check_truth(text, node.operand)
    elif isinstance(node, ast.Constant) and not isinstance(node.value, bool):
        raise _not_truth(text, node, node.value)
    elif isinstance(node, (ast.BinOp, ast.Call, ast.UnaryOp)):
        raise _error(text, node, f"`{ast.unparse(node)}` is a number, not true or false", _example())


def _truth(text: str, node: ast.expr, values: Mapping[str, Any]) -> bool:
    value = _value(text, node, values)
    if not isinstance(value, bool):
        raise _not_truth(text, node, value)
    return value


def _value(text: str, node: ast.expr, values: Mapping[str, Any]) -> Any:
    if isinstance(node, ast.Constant):
        return node.value
    if isinstance(node, ast.Name):
        if node.id not in values:
            raise _unknown(text, node, node.id, sorted(values))
        return values[node.id]
    if isinstance(node, ast.Attribute):
        return _member(text, node, node.value, node.attr, values)
    if isinstance(node, ast.Subscript):
        assert isinstance(node.slice, ast.Constant)
        return _member(text, node, node.value, str(node.slice.value), values)
    if isinstance(node, ast.BoolOp):
        parts = (_truth(text, part, values) for part in node.values)
        return all(parts) if isinstance(node.op, ast.And) else any(parts)
    if isinstance(node, ast.UnaryOp):
        if isinstance(node.op, ast.Not):
            return not _truth(text, node.operand, values)
        number = _number(text, node.operand, values)
        return -number if isinstance(node.op, ast.USub) else number
    if isinstance(node, ast.Compare):
        return _compare(text, node, values)
    if isinstance(node, ast.BinOp):
        numbers = _number(text, node.left, values), _number(text, node.right, values)
        return _computed(text, node, _ARITHMETIC[type(node.op)], *numbers)
    assert isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
    arguments = [_number(text, argument, values) for argument in node.args]
    return _computed(text, node, _CALLS[node.func.id][0], *arguments)


def _computed(text: str, node: ast.expr, function: Callable[..., Any], *numbers: Any) -> Any:
    try:
        return function(*numbers)
    except (ArithmeticError, TypeError, ValueError) as error:
        raise _error(text, node, f"`{ast.unparse(node)}` cannot be computed: {error}", _example()) from error


def _member(text: str, node: ast.expr, owner: ast.expr, name: str, values: Mapping[str, Any]) -> Any:
    found = _value(text, owner, values)
    label = ast.unparse(owner)
    if found is None:
        raise _error(text, node, f"{label} is None and has no {name}", _GUARD)
    if not isinstance(found, Mapping):
        raise _error(text, node, f"{label} is {found!r} and has no {name}", f"Use {label} itself.")
    if name not in found:
        raise _unknown(text, node, name, sorted(map(str, found)), f"{label}.")
    return found[name]


def _compare(text: str, node: ast.Compare, values: Mapping[str, Any]) -> bool:
    left_node, left = node.left, _value(text, node.left, values)
    for operation, right_node in zip(node.ops, node.comparators, strict=True):
        right = _value(text, right_node, values)
        if not _holds(text, operation, (left_node, left), (right_node, right)):
            return False
        left_node, left = right_node, right
    return True


def _holds(text: str, operation: ast.cmpop, left: tuple[ast.expr, Any], right: tuple[ast.expr, Any]) -> bool:
    if isinstance(operation, ast.Is):
        return left[1] is None
    if isinstance(operation, ast.IsNot):
        return left[1] is not None
    for node, value in (left, right):
        if isinstance(value, float) and math.isnan(value):
            raise _error(text, node, f"{ast.unparse(node)} is NaN", "Find out why the figure is no number.")
    if isinstance(operation, ast.Eq):
        return bool(left[1] == right[1])
    if isinstance(operation, ast.NotEq):
        return bool(left[1] != right[1])
    if not (isinstance(left[1], str) and isinstance(right[1], str)):
        for node, value in (left, right):
            _checked_number(text, node, value)
    return _ORDER[type(operation)](left[1], right[1])


def _number(text: str, node: ast.expr, values: Mapping[str, Any]) -> Any:
    return _checked_number(text, node, _value(text, node, values))


def _checked_number(text: str, node: ast.expr, value: Any) -> Any:
    if value is None:
        raise _error(text, node, f"{ast.unparse(node)} is None, where a number is needed", _GUARD)
    if not isinstance(value, (int, float)):
        raise _error(text, node, f"{ast.unparse(node)} is {value!r}, where a number is needed", _example())
    return value


def _is_called(body: ast.expr, name: ast.Name) -> bool:
    return any(isinstance(node, ast.Call) and node.func is name for node in ast.walk(body))


def _not_truth(text: str, node: ast.expr, value: Any) -> UserError:
    return _error(text, node, f"`{ast.unparse(node)}` is {value!r}, not true or false", _example())


def _unknown(text: str, node: ast.expr, name: str, available: list[str], owner: str = "") -> UserError:
    close = difflib.get_close_matches(name, available, n=1)
    hint = f"Did you mean {owner}{close[0]}? " if close else ""
    known = ", ".join(owner + each for each in available) or "nothing"
    return _error(text, node, f"there is no {owner}{name}", f"{hint}Available: {known}.")


def _refused(text: str, node: ast.expr, what: str) -> UserError:
    remedy = "Allowed are comparisons, and/or/not, arithmetic, names, literals, `is None`, min, max, abs and round."
    return _error(text, node, f"a gate cannot have {what}", remedy)


def _error(text: str, node: ast.expr, what: str, remedy: str) -> UserError:
    what = f"{what}, at column {node.col_offset + 1} of the gate"
    return UserError(ErrorCode.GATE_INVALID, what, value=text, remedy=remedy)


def _example() -> str:
    return "Write a comparison, for example `candidate.score >= 0.5`."
