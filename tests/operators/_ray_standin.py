"""A stand-in for Ray's Jobs REST API: a real HTTP server on loopback that answers as Ray 2.60 was seen to answer."""

from __future__ import annotations

import json
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote

# Writes a connection to the stand-in, and returns its id.
Connect = Callable[..., str]


@dataclass
class StandinJob:
    """A job; the test moves it on. `looks_to_stop`: how often it is still seen running after it was told to stop."""

    entrypoint: str
    metadata: dict[str, str] = field(default_factory=dict)
    body: dict[str, Any] = field(default_factory=dict)
    status: str = "RUNNING"
    message: str = ""
    exit_code: int | None = None
    logs: str = ""
    looks_to_stop: int = 2
    stopping: bool = False

    def end(self, status: str, *, exit_code: int | None = None, message: str = "") -> None:
        self.exit_code, self.message, self.status = exit_code, message, status


@dataclass
class Fault:
    """What happens to a request instead of an answer, or after it (`late`): a status, silence, or a cut connection."""

    status: int = 0
    text: str = ""
    headers: dict[str, str] = field(default_factory=dict)
    hang_s: float = 0.0
    cut: bool = False
    late: bool = False
    method: str = ""


class RayStandin:
    """The cluster. `requests` are all that came in; `faults` are met in order by those of their method."""

    def __init__(self) -> None:
        self.jobs: dict[str, StandinJob] = {}
        self.requests: list[str] = []
        self.submissions: list[str] = []
        self.faults: list[Fault] = []
        self.token: str | None = None
        # Applied to each job when it is submitted.
        self.on_submit: Any = lambda job: None
        # Applied after its log was read.
        self.on_read: Any = lambda job: None
        self.lock = threading.Lock()
        self.url = ""

    @property
    def job(self) -> StandinJob:
        """The newest."""
        return list(self.jobs.values())[-1]

    def lose_head(self) -> None:
        """All jobs are forgotten."""
        self.jobs.clear()

    def answer(self, method: str, path: str, body: Any, token: str | None) -> tuple[int, Any]:
        if self.token is not None and token != f"Bearer {self.token}":
            return (401, "Unauthorized: Missing authentication token") if token is None else (403, "Forbidden: Invalid")
        if path == "/api/version":
            return 200, {"version": "4", "ray_version": "2.60.0", "ray_commit": "abc", "session_name": "s"}
        if path == "/api/jobs/" and method == "POST":
            return self._submit(body)
        job_id, _, verb = path.removeprefix("/api/jobs/").partition("/")
        job = self.jobs.get(unquote(job_id))
        if job is None:
            return 404, f"Job {job_id} does not exist"
        if method == "DELETE":
            if job.status in {"PENDING", "RUNNING"}:
                return 500, f"Traceback ... RuntimeError: Attempted to delete job '{job_id}', but it is in state"
            del self.jobs[unquote(job_id)]
            return 200, {"deleted": True}
        if verb == "stop":
            job.stopping = job.status in {"PENDING", "RUNNING"}
            return 200, {"stopped": job.stopping}
        if verb == "logs":
            read = job.logs
            self.on_read(job)
            return 200, {"logs": read}
        self._move_on(job)
        return 200, {
            "type": "SUBMISSION",
            "submission_id": unquote(job_id),
            "status": job.status,
            "message": job.message,
            "entrypoint": job.entrypoint,
            "metadata": job.metadata,
            "driver_exit_code": job.exit_code,
        }

    def _submit(self, body: Any) -> tuple[int, Any]:
        job_id = body["submission_id"]
        if job_id in self.jobs:
            # The agent's 400 in the head's 500.
            text = f"ValueError: Job with submission_id {job_id} already exists. Please use a different submission_id."
            return 500, f"Traceback ...\nRuntimeError: Request failed with status code 400: Traceback ...\n{text}\n."
        self.submissions.append(job_id)
        self.jobs[job_id] = StandinJob(entrypoint=body["entrypoint"], metadata=body.get("metadata") or {}, body=body)
        self.on_submit(self.jobs[job_id])
        return 200, {"job_id": job_id, "submission_id": job_id}

    def _move_on(self, job: StandinJob) -> None:
        if job.stopping and job.status in {"PENDING", "RUNNING"}:
            if job.looks_to_stop <= 0:
                job.status = "STOPPED"
            job.looks_to_stop -= 1

    def fault_for(self, method: str) -> Fault | None:
        with self.lock:
            for index, fault in enumerate(self.faults):
                if fault.method in {"", method}:
                    return self.faults.pop(index)
        return None


@contextmanager
def ray_standin(tls: ssl.SSLContext | None = None) -> Iterator[RayStandin]:
    ray = RayStandin()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def _any(self) -> None:
            length = int(self.headers.get("Content-Length") or 0)
            body = json.loads(self.rfile.read(length)) if length else None
            ray.requests.append(f"{self.command} {self.path}")
            fault = ray.fault_for(self.command)
            if fault is not None and not fault.late and self._fails(fault):
                return
            with ray.lock:
                status, answer = ray.answer(self.command, self.path, body, self.headers.get("Authorization"))
            if fault is not None and fault.late and self._fails(fault):
                return
            self._send(status, answer if isinstance(answer, str) else json.dumps(answer))

        def _fails(self, fault: Fault) -> bool:
            time.sleep(fault.hang_s)
            if fault.cut:
                self.close_connection = True
                return True
            if fault.status:
                self._send(fault.status, fault.text, fault.headers)
            return bool(fault.status)

        def _send(self, status: int, text: str, headers: dict[str, str] | None = None) -> None:
            data = text.encode()
            self.send_response(status)
            for name, value in (headers or {}).items():
                self.send_header(name, value)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        do_GET = do_POST = do_DELETE = _any

        def log_message(self, *_: Any) -> None:
            pass

        def handle(self) -> None:
            # A client that has lost patience is part of the test.
            try:
                super().handle()
            except (BrokenPipeError, ConnectionResetError):
                self.close_connection = True

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    if tls is not None:
        server.socket = tls.wrap_socket(server.socket, server_side=True)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
    thread.start()
    ray.url = f"{'https' if tls else 'http'}://127.0.0.1:{server.server_address[1]}"
    try:
        yield ray
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
