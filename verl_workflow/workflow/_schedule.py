"""Which steps of a run can begin, from what they wait for and what has come of them. Knows no storage and no clock."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator

from verl_workflow.workflow._plan import Step


class Schedule:
    """The steps that are still to be executed, and what each waits for.

    A step may have continued to others: whoever waits for it then waits for the last of those. All walks are loops, for
    chains of steps and of continuations may have any length.

    Args:
        load: gives the steps that a step has continued to, of which only the names are known before.
    """

    def __init__(self, load: Callable[[str], list[Step]]) -> None:
        self._load = load
        self._steps: dict[str, Step] = {}
        self._parents: dict[str, str] = {}
        self._last: dict[str, str] = {}
        # Further on the way to a step's source than what it continued to; perhaps not its end any more.
        self._ends: dict[str, str] = {}
        self._have: set[str] = set()
        self._planned: dict[str, int] = {}
        self._followers: dict[str, list[str]] = {}
        self._users: dict[str, int] = {}

    @property
    def unfinished(self) -> int:
        """How many known steps are still to be executed."""
        return len(self._planned)

    def add(self, steps: Iterable[Step]) -> None:
        """Make steps known; nothing of them is planned yet."""
        self._steps.update((step.name, step) for step in steps)

    def step(self, name: str) -> Step:
        """A step by its name, loaded when it is asked for first."""
        if name not in self._steps:
            self.add(self._load(self._parents[name]))
        return self._steps[name]

    def has(self, name: str) -> None:
        """The value of a step is there."""
        self._have.add(name)

    def drop(self, name: str) -> None:
        """The value of a step is there no more: nobody was going to use it."""
        self._have.discard(name)

    def continues(self, name: str, others: list[str]) -> None:
        """As read from a journal: a step has continued to others."""
        self._last[name] = others[-1]
        self._parents.update((other, name) for other in others)

    def source(self, name: str) -> str:
        """The step whose value is that of this one: itself, or the end of what it continued to."""
        passed = []
        while (last := self._ends.get(name, self._last.get(name))) is not None:
            passed.append(name)
            name = last
        # A workflow may continue thousands of times, and is asked for its end with each step.
        self._ends.update(dict.fromkeys(passed, name))
        return name

    def available(self, name: str) -> bool:
        return self.source(name) in self._have

    def scopes(self, name: str) -> Iterator[str]:
        """The steps that have led to this one by continuing, the nearest first."""
        while (parent := self._parents.get(name)) is not None:
            yield parent
            name = parent

    def want(self, names: Iterable[str]) -> list[str]:
        """Plan what these steps' values need, down to values that are there; returns those that can begin."""
        ready = []
        stack = [self.source(name) for name in names]
        while stack:
            name = stack.pop()
            if name in self._planned or name in self._have:
                continue
            missing = 0
            for before in self.step(name).after:
                source = self.source(before)
                self._users[source] = self._users.get(source, 0) + 1
                if source not in self._have:
                    missing += 1
                    self._followers.setdefault(source, []).append(name)
                    stack.append(source)
            self._planned[name] = missing
            if missing == 0:
                ready.append(name)
        return ready

    def finish(self, name: str) -> tuple[list[str], list[str]]:
        """The step's value has come; returns the steps that can begin now, and those whose values are used no more."""
        self._have.add(name)
        unused = self._leave(name)
        ready = []
        for follower in self._followers.pop(name, []):
            if follower in self._planned:
                self._planned[follower] -= 1
                if self._planned[follower] == 0:
                    ready.append(follower)
        return ready, unused

    def go_on(self, name: str, steps: list[Step]) -> tuple[list[str], list[str]]:
        """A planned step has continued to others; returns as `finish`."""
        self.add(steps)
        others = [step.name for step in steps]
        unused = self._leave(name)
        self.continues(name, others)
        waiting = self._followers.pop(name, [])
        self._followers.setdefault(others[-1], []).extend(waiting)
        self._users[others[-1]] = self._users.get(others[-1], 0) + self._users.pop(name, 0)
        return self.want([others[-1]]), unused

    def settle(self, name: str) -> tuple[list[str], list[str]]:
        """A step that had continued has got a value of its own instead; returns as `finish`."""
        end = self.source(name)
        waiting = self._followers.pop(end, [])
        self._followers.setdefault(name, []).extend(waiting)
        self._users[name] = self._users.get(name, 0) + self._users.pop(end, 0)
        self._last.pop(name)
        self._ends.clear()
        return self.finish(name)

    def drop_below(self, name: str) -> list[str]:
        """Plan nothing any more of what a step has continued to; returns what was planned."""
        dropped = [planned for planned in self._planned if name in self.scopes(planned)]
        for planned in dropped:
            del self._planned[planned]
        return dropped

    def lose(self, names: Iterable[str], flying: Collection[str]) -> tuple[list[str], list[str]]:
        """Values are gone. Returns what can begin to bring them back, and what was ready and has to wait for them.

        Args:
            flying: the steps that are under way; they have been given what they need.
        """
        lost = {self.source(name) for name in names}
        self._have -= lost
        waiting = []
        for user, missing in list(self._planned.items()):
            used = [source for source in map(self.source, self.step(user).after) if source in lost]
            if not used or user in flying:
                continue
            if missing == 0:
                waiting.append(user)
            self._planned[user] = missing + len(used)
            for source in used:
                self._followers.setdefault(source, []).append(user)
        return self.want(lost), waiting

    def _leave(self, name: str) -> list[str]:
        if self._planned.pop(name, None) is None:
            return []
        unused = []
        for before in self.step(name).after:
            source = self.source(before)
            self._users[source] -= 1
            if self._users[source] == 0:
                del self._users[source]
                unused.append(source)
        return unused
