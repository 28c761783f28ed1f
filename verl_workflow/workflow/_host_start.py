"""Starts a host from a job with no runtime_env, which it would hand on to all it starts. Reads its wishes as JSON."""

from __future__ import annotations

import json
import logging
import secrets
import sys


def main() -> None:
    import ray

    from verl_workflow.storage import Store
    from verl_workflow.workflow._client import NAMESPACE, host_options

    wish = json.load(sys.stdin)
    ray.init(address=wish["address"], namespace=NAMESPACE, log_to_driver=False, logging_level=logging.ERROR)
    store = Store(wish["storage"], durability=wish["durability"])
    actor = host_options(wish["name"]).remote(store, secrets.token_hex(8), wish["running"], wish["pending"])
    # Detached only from when it is there.
    ray.get(actor.hello.remote(None, None))
    ray.shutdown()


if __name__ == "__main__":
    main()
