"""The actor that holds a verl stage's placement groups between its attempts, and gives them up when nobody renews."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from verl_workflow.training._nodes import Group
from verl_workflow.training._owner import is_later

_log = logging.getLogger(__name__)
_LOOK_SECONDS = 0.5
_ACCELERATOR = "accelerator_type"
# So little of the resource that all of a node's GPUs have a share.
_SHARE = 0.001


@dataclass(frozen=True, kw_only=True)
class Bundles:
    """A placement group as Ray is asked for it: bundles that lie on one node.

    Attributes:
        pool: verl's name of what it belongs to. selector: labels that the node has.
    """

    pool: str
    bundles: tuple[Mapping[str, float], ...]
    selector: Mapping[str, str]

    @classmethod
    def of(cls, group: Group) -> Bundles:
        bundle: dict[str, float] = {"CPU": group.cpus_a_gpu, "GPU": 1}
        if group.where.accelerator is not None:
            bundle[f"{_ACCELERATOR}:{group.where.accelerator}"] = _SHARE
        return cls(pool=group.pool, bundles=(bundle,) * group.gpus, selector=dict(group.where.labels))


@dataclass(frozen=True, kw_only=True)
class Held:
    """A placement group that is held: Ray's id in hex, and its state (``CREATED`` when it has its place)."""

    pool: str
    id: str
    state: str


@dataclass(frozen=True, kw_only=True)
class Taken:
    """How an attempt's groups stand.

    Attributes:
        kept: whether they are those of the attempt before. overtaken_by: the later attempt that has them instead.
    """

    groups: tuple[Held, ...] = ()
    kept: bool = False
    overtaken_by: str = ""


class HeldGroups:
    """Holds the placement groups; a detached actor, named after the stage.

    Whoever trains takes the groups in turn, and renews. The groups go when a renewal is out of time, and with them the
    actor, so that a driver that was killed keeps no GPU for long.

    Args:
        prefix: how the names of the groups begin.
    """

    def __init__(self, prefix: str) -> None:
        self._prefix = prefix
        self._lock = threading.Lock()
        self._owner = ""
        self._asked: tuple[Bundles, ...] = ()
        self._groups: list[Any] = []
        self._made = 0
        self._lease = 60.0
        self._until = time.monotonic() + self._lease
        threading.Thread(target=self._expire, name="lease", daemon=True).start()

    def take(self, owner: str, lease: float, asked: Sequence[Bundles], targets: Sequence[str] = ()) -> Taken:
        """Hold these groups for the attempt `owner`; those of an earlier one stay when they are the same.

        Args:
            lease: seconds without renewal after which all is given up.
            targets: ids of nodes where new groups should lie if there is room.
        """
        with self._lock:
            if is_later(self._owner, owner):
                return Taken(overtaken_by=self._owner)
            self._owner, self._lease = owner, lease
            self._until = time.monotonic() + lease
            kept = tuple(asked) == self._asked and not self._broken()
            if not kept:
                self._remove()
                self._make(asked, targets)
            return Taken(groups=self._held(), kept=kept)

    def renew(self, owner: str) -> Taken:
        """Keep them for the attempt for another while."""
        with self._lock:
            if is_later(self._owner, owner):
                return Taken(overtaken_by=self._owner)
            self._until = time.monotonic() + self._lease
            return Taken(groups=self._held(), kept=True)

    def drop(self, owner: str) -> bool:
        """Give the groups up, unless a later attempt has taken them; whether that is done."""
        with self._lock:
            if is_later(self._owner, owner):
                return False
            self._remove()
            return True

    def _make(self, asked: Sequence[Bundles], targets: Sequence[str]) -> None:
        import ray

        self._made += 1
        for index, one in enumerate(asked):
            group = ray.util.placement_group(
                [dict(bundle) for bundle in one.bundles],
                strategy="STRICT_PACK",
                name=f"{self._prefix}{self._made}.{index}",
                bundle_label_selector=[dict(one.selector)] * len(one.bundles) if one.selector else None,
                _soft_target_node_id=(targets[index] or None) if index < len(targets) else None,
            )
            self._groups.append(group)
            self._asked = (*self._asked, one)

    def _remove(self) -> None:
        import ray

        for group in self._groups:
            ray.util.remove_placement_group(group)
        self._groups, self._asked = [], ()

    def _held(self) -> tuple[Held, ...]:
        import ray

        found = []
        for asked, group in zip(self._asked, self._groups, strict=True):
            state = ray.util.placement_group_table(group).get("state", "REMOVED")
            found.append(Held(pool=asked.pool, id=group.id.hex(), state=state))
        return tuple(found)

    def _broken(self) -> bool:
        """Whether a group is gone, or has lost its node and waits for another."""
        return any(held.state not in ("CREATED", "PENDING", "PREPARED") for held in self._held())

    def _expire(self) -> None:
        while True:
            time.sleep(_LOOK_SECONDS)
            with self._lock:
                if time.monotonic() > self._until:
                    try:
                        self._remove()
                    except Exception:  # noqa: BLE001 - logged, and the process ends
                        # They end with the actor all the same.
                        _log.exception("placement groups that nobody renews cannot be removed")
                    os._exit(0)
