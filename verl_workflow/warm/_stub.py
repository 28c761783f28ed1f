"""``python -S -E _stub.py <socket> <what python would be given>``: Python, forked from a warm server if there is one.

It stands in for the process that it had forked: hands its streams over, passes SIGTERM on, and ends as that one does.
Without a server it becomes plain Python. Only small modules are imported here, as it is started for each process.
"""

import json
import os
import signal
import socket
import sys

_PATIENCE_S = 2.0
_SUPERVISOR = "VERL_WORKFLOW_SUPERVISOR"
_PR_SET_PDEATHSIG = 1


def main(place: str, arguments: list[str]) -> None:
    _die_with_supervisor()
    answer = _ask(place, arguments)
    if answer is None:
        os.execv(sys.executable, [sys.executable, *arguments])
    assert answer is not None
    connection, pending = answer
    with connection:
        ended = False
        while not ended:
            while b"\n" in pending:
                line, _, pending = pending.partition(b"\n")
                told = json.loads(line)
                if "exit" in told:
                    _end_as(told["exit"])
            block = connection.recv(4096)
            ended = not block
            pending += block
    # The server is gone, and with it the process.
    os.kill(os.getpid(), signal.SIGKILL)


def _die_with_supervisor() -> None:
    """Where there is one: what it had forked ends when this does."""
    supervisor = os.environ.pop(_SUPERVISOR, None)
    if supervisor is not None:
        import ctypes

        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != int(supervisor):
            raise SystemExit("the supervisor ended before the process began")


def _ask(place: str, arguments: list[str]) -> "tuple[socket.socket, bytes] | None":
    """The connection behind which the process runs; None when no server takes it."""
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    connection.settimeout(_PATIENCE_S)
    environment = dict(os.environ)
    request = json.dumps({"arguments": arguments, "environment": environment, "folder": os.path.realpath(".")}).encode()
    folder, _, name = place.rpartition("/")
    try:
        # By way of a handle: a socket's path may be 107 bytes long.
        handle = os.open(folder, os.O_RDONLY)
        connection.connect(f"/proc/self/fd/{handle}/{name}")
        os.close(handle)
        socket.send_fds(connection, [len(request).to_bytes(8, "big")], [0, 1, 2])
        connection.sendall(request)
        block = connection.recv(4096)
    except OSError:
        block = b""
    if not block:
        connection.close()
        return None
    connection.settimeout(None)
    signal.signal(signal.SIGTERM, lambda *_: connection.sendall(b"T"))
    return connection, block


def _end_as(status: int) -> None:
    """As the process ended: its exit code, or killed by its signal."""
    if os.WIFSIGNALED(status):
        number = os.WTERMSIG(status)
        signal.signal(number, signal.SIG_DFL) if number not in (signal.SIGKILL, signal.SIGSTOP) else None
        os.kill(os.getpid(), number)
        # Some signals are of no effect on oneself at once.
        signal.pause()
    os._exit(os.WEXITSTATUS(status))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
