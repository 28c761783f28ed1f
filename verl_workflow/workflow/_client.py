"""The way from a user's process to the host of its cluster's workflows, and to the storage."""

from __future__ import annotations

import functools
import hashlib
import json
import logging
import os
import secrets
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from verl_workflow.errors import ErrorCode, UserError, VerlWorkflowError
from verl_workflow.storage import Store

NAMESPACE = "verl_workflow"
DEFAULT_STORAGE = ".verl-workflow"
_START_S = 120.0
# By these a submitted job hands its environment on to every process of its own that joins the cluster.
_OF_THE_JOB = frozenset({"RAY_JOB_CONFIG_JSON", "RAY_JOB_CONFIG_JSON_ENV_VAR", "RAY_RUNTIME_ENV_HOOK"})
_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Caller:
    """Who asks for a workflow. Attributes: job: Ray's id of the job; its steps run in workers of their own.
    runtime_env: of the job; that of a step is put over it.
    """

    job: str
    runtime_env: Mapping[str, Any] = field(default_factory=dict)

    @property
    def key(self) -> str:
        """Callers with the same one are served by the same workers: a step may ask in an environment of its own."""
        return json.dumps([self.job, dict(self.runtime_env)], sort_keys=True)


class Client:
    """What `init` has settled for this process: the storage, and the limits to start a host with.

    Ray is started and the host looked for when they are needed first: reading a storage needs neither.
    """

    def __init__(
        self, store: Store, running: int | None = None, pending: int | None = None, durability: str | None = None
    ) -> None:
        self.store = store
        self._limits = running, pending
        self._durability = durability
        self._host: Any = None
        self._session = ""
        self.token = ""

    def host(self) -> Any:
        """The host's actor handle; it is started where there is none.

        Raises:
            ValueError: it was started with other limits.
            VerlWorkflowError(CAPACITY): the cluster does not start it.
        """
        import ray

        if not ray.is_initialized():
            ray.init()
        context = ray.get_runtime_context()
        # Another cluster may have the address of the last one, and begins to number its jobs anew.
        session = f"{context.gcs_address} {context.get_node_id()} {context.get_job_id()}"
        if self._host is None or self._session != session:
            self._host, self.token = self._meet()
            self._session = session
        return self._host

    def caller(self) -> Caller:
        """This process's job, for which the host is asked; Ray is started where it was not."""
        import ray

        self.host()
        context = ray.get_runtime_context()
        return Caller(job=str(context.get_job_id()), runtime_env=dict(context.runtime_env))

    def forget(self) -> None:
        """Look for the host anew: it has died, with its cluster or for good."""
        self._host = None

    def _meet(self) -> tuple[Any, str]:
        import ray

        if self.store.uri.startswith("memory:"):
            raise UserError(
                ErrorCode.STORAGE,
                "a storage in memory belongs to one process, and a workflow runs in several",
                value=self.store.uri,
                remedy="Name a folder, or an s3://, gs:// or az:// address, with workflow.init(storage=...).",
            )
        # One host for a storage: a digest, for actors' names are shown in lists.
        name = f"workflows:{hashlib.sha256(self.store.uri.encode()).hexdigest()[:16]}"
        running, pending = (-1 if limit is None else limit for limit in self._limits)
        options = host_options(name)
        deadline = time.monotonic() + _START_S
        while True:
            if ray.get_runtime_context().runtime_env and not _is_there(name):
                # Of this job's environment, all jobs after it would have a part.
                self._start_apart(name, running, pending)
            actor = options.remote(self.store, secrets.token_hex(8), running, pending)
            try:
                return actor, ray.get(actor.hello.remote(*self._limits, self._durability), timeout=_START_S)
            except ray.exceptions.RayTaskError as error:
                raise error.cause from error
            except ray.exceptions.ActorDiedError:
                # On its way out when it was looked for.
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.1)
            except ray.exceptions.GetTimeoutError as error:
                raise VerlWorkflowError(
                    ErrorCode.CAPACITY,
                    "the cluster does not start the workflows' host",
                    where=self.store.uri,
                    remedy="See whether its nodes have memory left and can import verl_workflow.",
                    retryable=True,
                ) from error

    def _start_apart(self, name: str, running: int, pending: int) -> None:
        """Have a process that is no part of this job start the host; where it cannot, this job's environment helps."""
        import ray

        wish = {
            "address": ray.get_runtime_context().gcs_address,
            "name": name,
            "storage": self.store.uri,
            "durability": self.store.durability,
            "running": running,
            "pending": pending,
        }
        variables = {key: value for key, value in os.environ.items() if key not in _OF_THE_JOB}
        variables["PYTHONPATH"] = os.pathsep.join(filter(None, sys.path))
        command = [sys.executable, "-m", "verl_workflow.workflow._host_start"]
        try:
            subprocess.run(
                command,
                input=json.dumps(wish),
                env=variables,
                text=True,
                capture_output=True,
                check=True,
                timeout=_START_S,
            )
        except subprocess.SubprocessError as error:
            told = getattr(error, "stderr", None) or str(error)
            _log.warning(
                "the workflows' host has the runtime_env of this job, for it does not start without: %s",
                str(told).strip()[-500:],
            )


def host_options(name: str) -> Any:
    """The host's actor, to be made with a storage, a token, and how many may run and wait."""
    import ray

    from verl_workflow.workflow._host import WorkflowHost

    return ray.remote(WorkflowHost).options(
        name=name,
        namespace=NAMESPACE,
        lifetime="detached",
        get_if_exists=True,
        num_cpus=0,
        max_restarts=-1,
        max_task_retries=-1,
        max_concurrency=10_000,
    )


def _is_there(name: str) -> bool:
    import ray

    try:
        ray.get_actor(name, namespace=NAMESPACE)
    except ValueError:
        return False
    return True


def default_storage() -> str:
    """``VERL_WORKFLOW_STORAGE``, or `DEFAULT_STORAGE` in the working directory."""
    return os.environ.get("VERL_WORKFLOW_STORAGE") or DEFAULT_STORAGE


def python_path() -> tuple[str, ...]:
    """Where this process finds modules that are not installed: what a worker of another script's cluster misses."""
    return _looked_in(tuple(sys.path), str(Path.cwd()))


@functools.lru_cache(maxsize=8)
def _looked_in(path: tuple[str, ...], here: str) -> tuple[str, ...]:
    installed = tuple(f"{os.path.realpath(root)}{os.sep}lib" for root in (sys.prefix, sys.base_prefix))
    folders = [Path(here, folder).resolve() for folder in [*path, ""]]
    found = [str(folder) for folder in folders if folder.is_dir() and not str(folder).startswith(installed)]
    return tuple(dict.fromkeys(found))
