"""The sign of life of a host: workflows that wait for their turn are PENDING while it is seen."""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Mapping

from verl_workflow.errors import VerlWorkflowError
from verl_workflow.storage import Store
from verl_workflow.stored_json import is_number, parse_json
from verl_workflow.workflow._heartbeat import INTERVAL_S, LEASE_S
from verl_workflow.workflow._owner import is_dead, this_process

_log = logging.getLogger(__name__)


class HostLife:
    """Writes the sign from a thread, until the process ends."""

    def __init__(self, store: Store, token: str) -> None:
        self._store = store
        self._key = _key(token)
        self._owner = this_process()

    def start(self) -> None:
        self._write()
        threading.Thread(target=self._beat, name="host's heartbeat", daemon=True).start()

    def _beat(self) -> None:
        while True:
            time.sleep(INTERVAL_S)
            self._write()

    def _write(self) -> None:
        try:
            self._store.put(self._key, json.dumps({"owner": self._owner, "time": time.time()}).encode())
        except VerlWorkflowError as error:
            _log.warning("the host's heartbeat is not written: %s", error)


def is_alive(store: Store, token: object) -> bool:
    """Whether a host shows signs of life, by this machine's clock."""
    if not isinstance(token, str) or not token.isalnum():
        return False
    data = store.get(_key(token))
    try:
        found = parse_json(data) if data is not None else None
    except ValueError:
        return False
    if (
        not isinstance(found, Mapping)
        or not is_number(found.get("time"))
        or not isinstance(found.get("owner"), Mapping)
    ):
        return False
    return time.time() - found["time"] < LEASE_S and not is_dead(found["owner"])


def host_keys(store: Store) -> list[str]:
    """Where hosts give their signs of life, those that have ended too."""
    return store.list("hosts")


def _key(token: str) -> str:
    return f"hosts/{token}.json"
