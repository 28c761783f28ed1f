"""The door for events that come over HTTP: an application of Ray Serve. Needs the extra ``serve``."""

from __future__ import annotations

import asyncio
import reprlib
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse

from verl_workflow.errors import ErrorCode, UserError, VerlWorkflowError
from verl_workflow.storage import Store
from verl_workflow.stored_json import parse_json
from verl_workflow.workflow._sent_events import store_event

_STATUS = {
    ErrorCode.USAGE_INVALID: 400,
    ErrorCode.DATA_INVALID: 400,
    ErrorCode.RUN_UNKNOWN: 404,
    ErrorCode.RUN_ID_INVALID: 404,
    ErrorCode.EVENT_CONFLICT: 409,
}


def event_app(store: Store) -> FastAPI:
    """``POST /send_event/{workflow_id}`` with ``{"event_key": ..., "event_payload": ...}``.

    Answers 200 when the event is stored, now or before; 400: the body is none; 404: there is no such workflow; 409: it
    has another payload under this key; 503: the storage fails, and the same request may be made again.
    """
    app = FastAPI(title="Events of workflows", docs_url=None, redoc_url=None, openapi_url=None)

    # An id may hold slashes.
    @app.post("/send_event/{workflow_id:path}")
    async def send_event(workflow_id: str, request: Request) -> JSONResponse:
        try:
            key, payload = _event_of(await request.body())
            new = await asyncio.to_thread(store_event, store, workflow_id, key, payload)
        except VerlWorkflowError as error:
            return JSONResponse({"error": error.to_json()}, status_code=_STATUS.get(error.code, 503))
        return JSONResponse({"workflow_id": workflow_id, "event_key": key, "new": new})

    return app


def deploy_events(store: Store, *, host: str, port: int, route_prefix: str) -> str:
    """See `verl_workflow.workflow.serve_events`."""
    from ray import serve

    class Events:
        pass

    ingress = serve.ingress(event_app(store))(Events)
    deployment: Any = serve.deployment(name="events", ray_actor_options={"num_cpus": 0})(ingress)
    serve.start(http_options={"host": host, "port": port})
    _check_listening(host, port)
    serve.run(deployment.bind(), name=f"workflow-events{route_prefix.replace('/', '-')}", route_prefix=route_prefix)
    shown = f"[{host}]" if ":" in host else host
    return f"http://{shown}:{port}{route_prefix}"


def _check_listening(host: str, port: int) -> None:
    """Raise UserError when Serve ran already, for then it goes on listening elsewhere, perhaps to the whole network."""
    from ray.serve.context import _get_global_client

    found = _get_global_client().http_config
    if (found.host, found.port) != (host, port):
        raise UserError(
            ErrorCode.USAGE_INVALID,
            f"Ray Serve runs on this cluster already, and listens on {found.host}:{found.port}",
            where="serve_events",
            value=f"{host}:{port}",
            remedy="Name that host and port, if all who reach it may send events; or shut Serve down first.",
        )


def _event_of(body: bytes) -> tuple[str, Any]:
    try:
        found = parse_json(body)
    except ValueError as error:
        raise _bad(f"it is not JSON ({error})") from error
    if not isinstance(found, dict) or not {"event_key", "event_payload"} <= set(found):
        raise _bad(f"it is {reprlib.repr(found)}")
    if not isinstance(found["event_key"], str):
        raise _bad(f"its event_key is {reprlib.repr(found['event_key'])}, not a text")
    return found["event_key"], found["event_payload"]


def _bad(why: str) -> UserError:
    return UserError(
        ErrorCode.USAGE_INVALID,
        f"this is not the body of an event: {why}",
        where="body",
        remedy='Send a JSON object: {"event_key": "...", "event_payload": ...}.',
    )
