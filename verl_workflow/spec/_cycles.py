"""Stages that wait for each other."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence


def cycle_from(start: str, needs: Mapping[str, Sequence[str]], done: set[str]) -> list[str] | None:
    """A cycle of two or more stages that is reached from `start`; each stage is visited once overall."""
    trail: list[str] = []
    stack: list[tuple[str, Iterator[str]]] = []

    def enter(name: str) -> None:
        done.add(name)
        trail.append(name)
        stack.append((name, iter(needs.get(name, ()))))

    if start not in done:
        enter(start)
    while stack:
        name, rest = stack[-1]
        for target in rest:
            if target in trail and target != name:
                return trail[trail.index(target) :]
            if target not in done:
                enter(target)
                break
        else:
            stack.pop()
            trail.pop()
    return None
