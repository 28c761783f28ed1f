"""The packages of jobs whose workflows go on when the job is over."""

from __future__ import annotations

import collections
import contextlib
import logging
import secrets
import threading
from collections.abc import Iterator
from typing import Any

from verl_workflow.workflow._client import NAMESPACE, Caller

# What Ray uploads for a job, and removes when nobody uses it any more.
_UPLOADED = ("working_dir", "py_modules")
_log = logging.getLogger(__name__)


class Packages:
    """Keeps what jobs have uploaded on the cluster while their workflows are driven.

    Ray counts the jobs and the detached actors that use a package, and no tasks: a step that begins when its job is
    over would find none. Hence an idle actor for each such job.

    Args:
        host: token of the one whose workflows they are.
    """

    def __init__(self, host: str) -> None:
        self._host = host
        self._lock = threading.Lock()
        self._users: collections.Counter[str] = collections.Counter()
        self._actors: dict[str, Any] = {}

    def end_left_ones(self) -> None:
        """Those of an earlier process of this host."""
        import ray

        for actor in ray.util.list_named_actors(all_namespaces=True):
            if actor["namespace"] == NAMESPACE and actor["name"].startswith(f"packages:{self._host}:"):
                _end(ray.get_actor(actor["name"], namespace=NAMESPACE))

    @contextlib.contextmanager
    def kept(self, caller: Caller) -> Iterator[None]:
        """Inside, the packages of this job are there, whether it is or not."""
        if not any(caller.runtime_env.get(field) for field in _UPLOADED):
            yield
            return
        with self._lock:
            self._users[caller.key] += 1
            if caller.key not in self._actors:
                self._actors[caller.key] = _keeper(f"packages:{self._host}:{secrets.token_hex(4)}", caller)
        try:
            yield
        finally:
            with self._lock:
                self._users[caller.key] -= 1
                if not self._users[caller.key]:
                    _end(self._actors.pop(caller.key))


class _Keeper:
    """The actor's class."""


def _keeper(name: str, caller: Caller) -> Any:
    import ray

    options = ray.remote(_Keeper).options(
        name=name,
        namespace=NAMESPACE,
        lifetime="detached",
        num_cpus=0,
        runtime_env=dict(caller.runtime_env),
    )
    return options.remote()


def _end(actor: Any) -> None:
    import ray

    try:
        ray.kill(actor)
    except Exception as error:  # noqa: BLE001 - it may be gone, and nothing depends on it any more
        _log.info("the keeper of a job's packages is not ended: %s", error)
