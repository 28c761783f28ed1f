"""Chains of errors as JSON."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

_LONGEST = 8000


def error_chain(error: BaseException) -> list[dict[str, str]]:
    """The error and its causes, outermost first.

    Each link has its type (with module), the last 8,000 characters of its message, and in ``by`` how it hangs on the
    one before it: ``cause``, or ``context`` where one was raised while another was handled, which need not have
    caused it.
    """
    chain: list[dict[str, str]] = []
    seen: set[int] = set()
    current: BaseException | None = error
    by = "cause"
    while current is not None and id(current) not in seen:
        seen.add(id(current))
        kind = type(current)
        chain.append({"type": f"{kind.__module__}.{kind.__qualname__}", "message": str(current)[-_LONGEST:], "by": by})
        current, by = _behind(current)
    return chain


def _behind(error: BaseException) -> tuple[BaseException | None, str]:
    # Ray keeps what a remote call raised in an attribute of its own.
    cause = getattr(error, "cause", None)
    if isinstance(cause, BaseException):
        return cause, "cause"
    if error.__cause__ is not None or error.__suppress_context__:
        return error.__cause__, "cause"
    return error.__context__, "context"


def by_cause(chain: Sequence[Mapping[str, str]]) -> list[list[Mapping[str, str]]]:
    """The chain in pieces: the error with what caused it, then each error that was being handled with what caused that
    one. In each piece the innermost error comes first.
    """
    pieces: list[list[Mapping[str, str]]] = []
    for link in chain:
        if not pieces or link.get("by") == "context":
            pieces.append([])
        pieces[-1].insert(0, link)
    return pieces


def headline(chain: Sequence[Mapping[str, str]]) -> str:
    """The innermost cause in one line."""
    if not chain:
        return "no error was recorded"
    return told(by_cause(chain)[0][0])


def told(link: Mapping[str, str]) -> str:
    """One error of a chain in one line."""
    message = link["message"].strip().splitlines() or [""]
    return f"{link['type'].rsplit('.', 1)[-1]}: {message[-1] or message[0]}"
