"""The driver as a detached Ray actor: it outlives whoever started it, and comes back when its node is lost."""

from __future__ import annotations

import importlib
import json
import logging
import secrets
import socket
import threading
import time
from dataclasses import dataclass
from typing import Any

from verl_workflow.errors import ErrorCode, UserError, VerlWorkflowError
from verl_workflow.storage import Store
from verl_workflow.workflow._attempt import Raised
from verl_workflow.workflow._definition import read_definition
from verl_workflow.workflow._driver import Driver
from verl_workflow.workflow._fold import TERMINAL_STATES, RunStatus
from verl_workflow.workflow._launch import RayLauncher
from verl_workflow.workflow._names import RunKey
from verl_workflow.workflow._owner import is_rebuilt, this_process
from verl_workflow.workflow._plan import Plan
from verl_workflow.workflow._state import read_run

# A busy machine takes a minute to start a worker and import what it needs; one that is slower is started again once.
_ANSWER_S = 90.0
_START_S = 2 * _ANSWER_S
_LOOK_S = 2.0
_HEAD_PATIENCE_S = 5.0
_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class DriverHandle:
    """A driver that works on a cluster.

    Attributes:
        token: of this driver alone; what stopped it, if anything but the run's end, is stored under it.
        actor: the Ray actor's handle.
        ended_epoch: of the end, if any, that the run had come to before and that this driver is to go beyond; else 0.
    """

    store_uri: str
    run: RunKey
    token: str
    actor: Any
    ended_epoch: int = 0

    @property
    def run_id(self) -> str:
        return self.run.run_id


class RunDriver:
    """The actor's class. It drives from a thread begun by its constructor, so that a restart by Ray is a replay."""

    def __init__(self, store_uri: str, run: RunKey, plan_loader: str, token: str, force: bool) -> None:

        self._token = token
        self._met = threading.Event()
        self._ended = False
        # Force was meant for the owner of that moment, not for whoever has the run when Ray rebuilds the actor.
        if is_rebuilt():
            force = False
            self._met.set()
        arguments = (store_uri, run, plan_loader, force)
        threading.Thread(target=self._drive, args=arguments, name="driver", daemon=True).start()

    def meet(self) -> tuple[str, bool]:
        """This driver's token, and whether it is at work."""
        at_work = not self._ended
        self._met.set()
        return self._token, at_work

    def _drive(self, store_uri: str, run: RunKey, plan_loader: str, force: bool) -> None:
        import ray

        store = Store(store_uri)
        try:
            plan = _load_plan(store, run.run_id, plan_loader)
            owner = {**this_process(), "driver": self._token}
            Driver(store, run.run_id, plan, RayLauncher(), owner=owner, run=run, force=force).drive()
        except Exception as error:  # noqa: BLE001 - the end of the thread: whoever waits finds it in the storage
            _log.exception("the driver of run %s has stopped", run.run_id)
            self._leave_word(store, run, error)
        finally:
            self._ended = True
            # Whoever starts a driver wants to have seen it, however short its life.
            self._met.wait(_ANSWER_S)
            ray.kill(ray.get_runtime_context().current_actor, no_restart=True)

    def _leave_word(self, store: Store, run: RunKey, error: Exception) -> None:
        facts = {**Raised.of(error).to_json(""), "user": isinstance(error, UserError)}
        try:
            store.put(_word_key(run, self._token), json.dumps(facts).encode())
        except VerlWorkflowError:
            _log.exception("and the storage does not take the reason")


def start_driver(
    store_uri: str, run_id: str, plan_loader: str, *, force: bool = False, namespace: str = "verl_workflow"
) -> DriverHandle:
    """Start the run's driver on the connected cluster, or find the one that is at work there. Returns before it ends.

    The actor is named ``run:<run_id>:<incarnation>``. It leaves the cluster by itself when the run has ended or is lost
    to another driver; when its node is lost, Ray restarts it, and it takes the run up where the journal ends.

    Args:
        plan_loader: ``module:function``, called in the actor as ``function(definition, store_uri, run_id)`` for
            a `Plan`.
        force: take the run even from an owner that shows signs of life, one on this very cluster included.

    Raises:
        UserError: RUN_UNKNOWN or RUN_ID_INVALID.
        VerlWorkflowError(CAPACITY): the cluster has not started the driver in time.
    """
    import ray

    before = read_run(Store(store_uri), run_id)
    # Of this run: the driver of a deleted one may not have noticed yet.
    name = f"run:{run_id}:{before.incarnation}"
    token = secrets.token_hex(8)
    remote = ray.remote(RunDriver).options(
        name=name,
        namespace=namespace,
        lifetime="detached",
        get_if_exists=True,
        num_cpus=0,
        max_restarts=-1,
        max_task_retries=-1,
        max_concurrency=4,
    )
    deadline = time.monotonic() + _START_S
    while True:
        actor = remote.remote(store_uri, before.key, plan_loader, token, force)
        found, at_work = _meet(actor)
        if found is not None and (found == token or (at_work and not force)):
            return DriverHandle(
                store_uri=store_uri,
                run=before.key,
                token=found,
                actor=actor,
                ended_epoch=before.epoch if before.status in TERMINAL_STATES else 0,
            )
        if time.monotonic() > deadline:
            raise VerlWorkflowError(
                ErrorCode.CAPACITY,
                "the cluster does not start the run's driver",
                where=run_id,
                remedy="See whether its nodes have memory left and can import the run's code.",
                retryable=True,
            )
        # On its way out, dead, or to be replaced by force.
        ray.kill(actor, no_restart=True)
        _await_gone(name, namespace, deadline)


def driver_failure(handle: DriverHandle) -> VerlWorkflowError | None:
    """Why the driver stopped without ending the run; None while it works and when the run has ended.

    The driver's own words when it left any, else that its actor, or the head of its cluster, is gone. Takes a few
    seconds when the head does not answer.
    """
    import ray

    store = Store(handle.store_uri)
    if (data := store.get(_word_key(handle.run, handle.token))) is not None:
        return _error_from(json.loads(data))
    if not _head_answers():
        return VerlWorkflowError(
            ErrorCode.CLUSTER_UNREACHABLE,
            "the head of the Ray cluster is gone",
            where=handle.run_id,
            remedy="Resume the run on a cluster that works.",
            retryable=True,
        )
    try:
        ray.get(handle.actor.meet.remote(), timeout=_LOOK_S)
    except ray.exceptions.ActorDiedError as error:
        # Its last words may have come in between.
        if (data := store.get(_word_key(handle.run, handle.token))) is not None:
            return _error_from(json.loads(data))
        state = read_run(store, handle.run_id)
        if state.status in TERMINAL_STATES and state.epoch > handle.ended_epoch:
            return None
        return VerlWorkflowError(
            ErrorCode.WORKER_LOST,
            f"the run's driver has died: {_first_line(error)}",
            where=handle.run_id,
            remedy="Resume the run.",
            retryable=True,
        )
    except (ray.exceptions.GetTimeoutError, ray.exceptions.ActorUnavailableError):
        # Being restarted: asked again at the next look.
        return None
    return None


def still_drives(handle: DriverHandle) -> bool:
    """Whether the run is in this very driver's hands, from what the storage tells; asks no cluster."""
    state = read_run(Store(handle.store_uri), handle.run_id)
    return state.status is RunStatus.RUNNING and (state.owner or {}).get("driver") == handle.token


def _load_plan(store: Store, run_id: str, plan_loader: str) -> Plan:
    module, _, function = plan_loader.partition(":")
    definition = read_definition(store, run_id)["definition"]
    plan = getattr(importlib.import_module(module), function)(definition, store.uri, run_id)
    assert isinstance(plan, Plan), f"{plan_loader} returned {type(plan).__name__}"
    return plan


def _meet(actor: Any) -> tuple[str | None, bool]:
    """The token of the driver in `actor`, and whether it is at work; (None, False) when it does not answer."""
    import ray

    try:
        token, at_work = ray.get(actor.meet.remote(), timeout=_ANSWER_S)
    except (ray.exceptions.RayActorError, ray.exceptions.GetTimeoutError):
        return None, False
    return token, at_work


def _await_gone(name: str, namespace: str, deadline: float) -> None:
    import ray

    while time.monotonic() < deadline:
        try:
            ray.get_actor(name, namespace=namespace)
        except ValueError:
            return
        time.sleep(0.05)


def _head_answers() -> bool:
    """Whether the cluster's control service takes connections: Ray ends a process that misses it, without a word."""
    import ray

    host, _, port = ray.get_runtime_context().gcs_address.rpartition(":")
    deadline = time.monotonic() + _HEAD_PATIENCE_S
    while True:
        try:
            socket.create_connection((host.strip("[]"), int(port)), timeout=_HEAD_PATIENCE_S).close()
        except OSError:
            if time.monotonic() > deadline:
                return False
            time.sleep(0.5)
        else:
            return True


def _error_from(facts: dict[str, Any]) -> VerlWorkflowError:
    code = ErrorCode(facts["code"])
    kind = UserError if facts.get("user") else VerlWorkflowError
    return kind(code, facts["what"], where=facts["where"], remedy=facts["remedy"], retryable=facts["retryable"])


def _word_key(run: RunKey, token: str) -> str:
    return f"{run.folder}/drivers/{token}.json"


def _first_line(error: Exception) -> str:
    return next(iter(str(error).strip().splitlines()), type(error).__name__)
