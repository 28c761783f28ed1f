"""The way from a user's process to the host of its cluster's workflows, and to the storage."""

from __future__ import annotations

import functools
import hashlib
import os
import secrets
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
_GONE_S = 30.0


@dataclass(frozen=True, kw_only=True)
class Caller:
    """Who asks for a workflow. Attributes: job: Ray's id of the job; its steps run in workers of their own.
    runtime_env: of the job; that of a step is put over it.
    """

    job: str
    runtime_env: Mapping[str, Any] = field(default_factory=dict)


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
        session = ray.get_runtime_context().get_job_id() + ray.get_runtime_context().gcs_address
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

    @property
    def is_met(self) -> bool:
        """Whether the host was needed so far."""
        return self._host is not None

    def forget(self) -> None:
        """Look for the host anew: it has died, with its cluster or for good."""
        self._host = None

    def _meet(self) -> tuple[Any, str]:
        import ray

        from verl_workflow.workflow._host import WorkflowHost

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
        options = ray.remote(WorkflowHost).options(
            name=name,
            namespace=NAMESPACE,
            lifetime="detached",
            get_if_exists=True,
            num_cpus=0,
            max_restarts=-1,
            max_task_retries=-1,
            max_concurrency=10_000,
        )
        deadline = time.monotonic() + _START_S
        while True:
            actor = options.remote(self.store, secrets.token_hex(8), running, pending)
            try:
                return actor, ray.get(actor.hello.remote(*self._limits, self._durability), timeout=_START_S)
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
