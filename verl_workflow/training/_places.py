"""A verl stage's GPUs: reserved before verl starts, kept between its attempts, and given back."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from verl_workflow.errors import ErrorCode, FencedError, VerlWorkflowError
from verl_workflow.training._cluster import Report, cluster_nodes, no_room_in_time
from verl_workflow.training._held_groups import Bundles, Held, HeldGroups, Taken
from verl_workflow.training._names import NAMESPACE, StageName
from verl_workflow.training._nodes import Need, Node, fit, shortage
from verl_workflow.training._owner import OvertakenError

_log = logging.getLogger(__name__)
_ANSWER_SECONDS = 60.0
_RENEWALS = 8
_LONGEST_PAUSE = 1.0
# By then Ray's head has heard what groups that were made just now take of their nodes.
_SETTLED_SECONDS = 2.0
_TRIES = 5


class Places:
    """The placement groups of a verl stage, as one attempt has them.

    Args:
        owner: how the attempt signs.
        lease: seconds for which the groups outlive their last renewal, longer than the pause before the next attempt.
    """

    def __init__(self, name: StageName, owner: str, lease: float) -> None:
        self._name = name
        self._owner = owner
        self._lease = lease
        self._stop = threading.Event()
        self._renewing: threading.Thread | None = None
        self._given_back = False

    def reserve(self, need: Need, report: Report, *, timeout: float) -> Mapping[str, list[str]]:
        """Reserve what the training needs, or take over what the attempt before has held.

        Shows what is missing while it waits; returns when the groups have their places and there are CPUs for what
        verl starts beside them.

        Returns:
            Ids of the groups in hex, in the order of `need`, by verl's name of the pool.

        Raises:
            VerlWorkflowError: CAPACITY, retryable, when it is not there within `timeout` seconds.
            OvertakenError: a later attempt has the stage's GPUs.
        """
        began = time.monotonic()
        before = fit(need, cluster_nodes(), idle=False)
        asked = [Bundles.of(group) for group in need.groups]
        taken = self._take(asked, before.nodes)
        self._renew_from_now_on()
        sure = taken.kept or before.missing is None
        pause = 0.05
        while True:
            nodes, waited = cluster_nodes(), time.monotonic() - began
            missing = _missing(need, taken.groups, nodes)
            if missing is None and (sure or waited > _SETTLED_SECONDS):
                return _by_pool(taken.groups)
            if missing is not None:
                if waited > timeout:
                    raise no_room_in_time(need, missing, timeout)
                if waited > _SETTLED_SECONDS:
                    report({"phase": f"waiting for {need}: {missing}"})
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE)
            taken = self._looked_after(asked)

    def release(self) -> None:
        """Give them back, unless a later attempt has them. What hinders it is logged: they go by themselves in time."""
        import ray

        if self._given_back:
            return
        self._given_back = True
        self.leave()
        try:
            holder = ray.get_actor(self._name.holder, namespace=NAMESPACE)
            if ray.get(holder.drop.remote(self._owner), timeout=_ANSWER_SECONDS):
                ray.kill(holder)
        except ValueError:
            # Ray's word for "there is none of that name".
            return
        except ray.exceptions.RayError as error:
            _log.warning("the GPUs of %s are given back only after %.0f s: %s", self._name, self._lease, error)

    def leave(self) -> None:
        """Keep them for the attempt that follows, for as long as the lease."""
        self._stop.set()
        if self._renewing is not None:
            self._renewing.join(timeout=_ANSWER_SECONDS)
            self._renewing = None

    def _take(self, asked: Sequence[Bundles], targets: Sequence[str]) -> Taken:
        import ray

        for _ in range(_TRIES):
            try:
                return self._checked(_holder(self._name).take.remote(self._owner, self._lease, asked, targets))
            except ray.exceptions.RayActorError as error:
                # One whose lease ran out just now; its name is free in a moment.
                _log.info("the holder of the GPUs of %s has ended: %s", self._name, error)
                time.sleep(_LONGEST_PAUSE)
        raise VerlWorkflowError(
            ErrorCode.CAPACITY,
            "the actor that holds the stage's GPUs ends whenever it is asked",
            where=self._name.holder,
            remedy="Look at its log in Ray's dashboard, or below the session's logs.",
            retryable=True,
        )

    def _looked_after(self, asked: Sequence[Bundles]) -> Taken:
        """How the groups stand; what has been lost meanwhile is asked for anew."""
        import ray

        try:
            taken = self._renewed()
        except (ValueError, ray.exceptions.RayActorError) as error:
            _log.info("the holder of the GPUs of %s was lost: %s", self._name, error)
            return self._take(asked, ())
        return self._take(asked, ()) if any(one.state == "REMOVED" for one in taken.groups) else taken

    def _renewed(self) -> Taken:
        import ray

        holder = ray.get_actor(self._name.holder, namespace=NAMESPACE)
        return self._checked(holder.renew.remote(self._owner))

    def _checked(self, answer: Any) -> Taken:
        import ray

        taken: Taken = ray.get(answer, timeout=_ANSWER_SECONDS)
        if taken.overtaken_by:
            raise OvertakenError(
                ErrorCode.FENCED,
                f"attempt {taken.overtaken_by} has the stage's GPUs now: this one, {self._owner}, ends",
                where=self._name.stage,
            )
        return taken

    def _renew_from_now_on(self) -> None:
        self._renewing = threading.Thread(target=self._renew, name="GPUs of the stage", daemon=True)
        self._renewing.start()

    def _renew(self) -> None:
        import ray

        while not self._stop.wait(self._lease / _RENEWALS):
            try:
                self._renewed()
            except (ValueError, FencedError) as error:
                _log.warning("the GPUs of %s are held no longer: %s", self._name, error)
                return
            except ray.exceptions.RayError as error:
                # The head may be away for a moment; without the groups verl's workers end, which is seen as such.
                _log.warning("the GPUs of %s were not renewed: %s", self._name, error)


@contextlib.contextmanager
def kept_for_retries(name: StageName, owner: str, *, lease: float) -> Iterator[Places]:
    """The stage's places; they are given back at the end, unless it is an error after which another attempt follows."""
    places = Places(name, owner, lease)
    try:
        yield places
    except VerlWorkflowError as error:
        # Who found no room lets others have what there was.
        again = isinstance(error, FencedError) or (error.retryable and error.code is not ErrorCode.CAPACITY)
        (places.leave if again else places.release)()
        raise
    except BaseException:
        places.release()
        raise
    else:
        places.release()


def _holder(name: StageName) -> Any:
    """The actor that holds the stage's groups, on this node if it is made anew."""
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    here = NodeAffinitySchedulingStrategy(node_id=ray.get_runtime_context().get_node_id(), soft=True)
    make = ray.remote(num_cpus=0, max_concurrency=4)(HeldGroups).options(
        name=name.holder,
        namespace=NAMESPACE,
        lifetime="detached",
        get_if_exists=True,
        scheduling_strategy=here,
    )
    return make.remote(name.groups)


def _missing(need: Need, held: Sequence[Held], nodes: Sequence[Node]) -> str | None:
    """What the training still waits for, in words."""
    waiting = tuple(group for group, one in zip(need.groups, held, strict=True) if one.state != "CREATED")
    missing = shortage(replace(need, groups=waiting), nodes, idle=False)
    if missing is None and waiting:
        return f"Ray is about to place {len(waiting)} of {len(held)} groups"
    return missing


def _by_pool(held: Sequence[Held]) -> Mapping[str, list[str]]:
    found: dict[str, list[str]] = {}
    for one in held:
        found.setdefault(one.pool, []).append(one.id)
    return found
