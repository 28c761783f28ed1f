"""The driver as a detached Ray actor: outlives whoever started it, comes back when its node is lost."""

from __future__ import annotations

import importlib
import json
import secrets
import socket
import threading
import time
from dataclasses import dataclass
from typing import Any

from verl_workflow.errors import ErrorCode, VerlWorkflowError
from verl_workflow.storage import Store
from verl_workflow.workflow._driver import Driver
from verl_workflow.workflow._launch import RayLauncher, describe
from verl_workflow.workflow._state import TERMINAL_STATES, read_run

_PING_S = 15.0


@dataclass(frozen=True, kw_only=True)
class DriverHandle:
    """A driver that was started: `token` names it in the storage, should it fail."""

    store_uri: str
    run_id: str
    token: str
    actor: Any


class RunActor:
    """Drives one run in a thread that starts with the actor, so that a restart by Ray is a replay."""

    def __init__(self, store_uri: str, run_id: str, plan_loader: str, force: bool, token: str) -> None:
        self._arguments = (store_uri, run_id, plan_loader, force)
        self._token = token
        threading.Thread(target=self._drive, name="driver", daemon=True).start()

    def token(self) -> str:
        return self._token

    def _drive(self) -> None:
        import ray

        store_uri, run_id, plan_loader, force = self._arguments
        store = Store(store_uri)
        try:
            module, _, function = plan_loader.partition(":")
            definition = read_run(store, run_id).definition
            plan = getattr(importlib.import_module(module), function)(definition, store_uri, run_id)
            Driver(store=store, run_id=run_id, plan=plan, launcher=RayLauncher(), force=force).run()
        except Exception as error:  # noqa: BLE001 - the boundary of the actor: whoever waits reads it in the storage
            store.put(f"runs/{run_id}/drivers/{self._token}.json", json.dumps(describe(error)).encode())
        ray.kill(ray.get_runtime_context().current_actor, no_restart=True)


def start_driver(
    store_uri: str, run_id: str, plan_loader: str, *, force: bool = False, namespace: str = "verl_workflow"
) -> DriverHandle:
    """Start the run's driver on the connected cluster, or find the one that is at work there.

    Args:
        plan_loader: ``module:function``, called as ``function(definition, store_uri, run_id)`` for the `Plan`.
        force: take the run from an owner that is alive; a driver on this very cluster is replaced.
    """
    import ray

    name = f"run:{run_id}"
    if (found := _alive(name, namespace)) is not None:
        if not force:
            return DriverHandle(store_uri=store_uri, run_id=run_id, token=ray.get(found.token.remote()), actor=found)
        ray.kill(found, no_restart=True)
        _wait_until_gone(name, namespace)
    token = secrets.token_hex(8)
    actor = (
        ray.remote(RunActor)
        .options(
            name=name,
            namespace=namespace,
            lifetime="detached",
            num_cpus=0,
            max_restarts=-1,
            max_concurrency=4,
        )
        .remote(store_uri, run_id, plan_loader, force, token)
    )
    return DriverHandle(store_uri=store_uri, run_id=run_id, token=token, actor=actor)


def driver_failure(handle: DriverHandle) -> VerlWorkflowError | None:
    """Why the driver stopped without ending the run; None while it works and when it has ended the run.

    The driver's own words when it left any, else that it, or the head of its cluster, is gone.
    """
    import ray

    store = Store(handle.store_uri)
    if (data := store.get(f"runs/{handle.run_id}/drivers/{handle.token}.json")) is not None:
        content = json.loads(data)
        return VerlWorkflowError(
            ErrorCode(content["code"]),
            content["what"],
            where=content["where"],
            remedy=content["remedy"],
            retryable=content["retryable"],
        )
    if not _head_answers():
        return VerlWorkflowError(
            ErrorCode.CLUSTER_UNREACHABLE,
            "the head of the Ray cluster is gone",
            where=handle.run_id,
            remedy=f"Resume the run on a cluster that works: verl-workflow resume {handle.run_id}.",
            retryable=True,
        )
    try:
        ray.get(handle.actor.token.remote(), timeout=_PING_S)
    except ray.exceptions.ActorDiedError as error:
        if read_run(store, handle.run_id).status in TERMINAL_STATES:
            return None
        return VerlWorkflowError(
            ErrorCode.WORKER_LOST,
            f"the run's driver has died ({str(error).strip().splitlines()[0]})",
            where=handle.run_id,
            remedy=f"Resume the run: verl-workflow resume {handle.run_id}.",
            retryable=True,
        )
    except ray.exceptions.RayError:
        # Being restarted, or busy: asked again at the next look.
        return None
    return None


def _alive(name: str, namespace: str) -> Any:
    import ray

    try:
        actor = ray.get_actor(name, namespace=namespace)
        ray.get(actor.token.remote(), timeout=_PING_S)
    except (ValueError, ray.exceptions.RayError):
        return None
    return actor


def _wait_until_gone(name: str, namespace: str) -> None:
    import ray

    deadline = time.monotonic() + _PING_S
    while time.monotonic() < deadline:
        try:
            ray.get_actor(name, namespace=namespace)
        except ValueError:
            return
        time.sleep(0.1)


def _head_answers() -> bool:
    import ray

    host, _, port = ray.get_runtime_context().gcs_address.rpartition(":")
    for wait_s in (0.5, 1.0, 0.0):
        try:
            socket.create_connection((host.strip("[]"), int(port)), timeout=5).close()
        except OSError:
            time.sleep(wait_s)
        else:
            return True
    return False
