"""Starts fork servers of text processes by forking a process that has imported their modules.

Each job and each `LLM` starts such a server, a Python process whose imports take a sixth of a
second. A test run starts a thousand of these servers, but this module does their imports only once.
The real start is tested in `tests/text/processes`, and by all tests that run the program.
"""

from __future__ import annotations

import gc
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import traceback
from contextlib import suppress
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from multiprocessing.reduction import recv_handle, send_handle
from types import SimpleNamespace
from typing import IO

import pytest

from batchinfer.text.processes import fork_server, server_process
from batchinfer.text.processes.limits import leave_signals_to_parent

_SERVE = "import sys; sys.path[:] = sys.argv[1:]; from tests.fork_servers import serve; serve()"


def fork_servers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make `TextProcesses` fork its server instead of starting a process, until the test ends."""
    if hasattr(os, "pidfd_open"):
        known = {name: getattr(subprocess, name) for name in ("DEVNULL", "TimeoutExpired")}
        monkeypatch.setattr(server_process, "subprocess", SimpleNamespace(Popen=_start, **known))


class _Forked:
    """A fork server, with the methods of `subprocess.Popen` that its users call."""

    def __init__(self, pid: int, status: socket.socket) -> None:
        self._pid, self._status = pid, status
        self.returncode: int | None = None

    def wait(self, timeout: float) -> None:
        if self.returncode is None:
            if not select.select([self._status], [], [], timeout)[0]:
                raise subprocess.TimeoutExpired("a fork server", timeout)
            self.returncode = int(self._status.recv(16) or -signal.SIGKILL)
            self._status.close()

    def poll(self) -> int | None:
        with suppress(subprocess.TimeoutExpired):
            self.wait(0.0)
        return self.returncode

    def kill(self) -> None:
        if self.poll() is None:
            os.kill(self._pid, signal.SIGKILL)


class _Server:
    """The process that fork servers are forked from; it ends with this process."""

    def __init__(self, paths: list[str], environment: dict[str, str]) -> None:
        self.owner = os.getpid()
        self._lock = threading.Lock()
        self._connection, theirs = Pipe()
        with theirs:
            command = [sys.executable, "-c", _SERVE, *paths]
            self._process = subprocess.Popen(command, stdin=theirs.fileno(), env=environment)

    def fork(self, environment: dict[str, str], stdin: int, stderr: int) -> _Forked:
        ours, theirs = socket.socketpair()
        with self._lock, theirs:
            self._connection.send(environment)
            for descriptor in (stdin, stderr, theirs.fileno()):
                send_handle(self._connection, descriptor, self._process.pid)
            return _Forked(self._connection.recv(), ours)


_server: _Server | None = None


def _start(
    command: list[str], *, stdin: int, stdout: int, stderr: IO[bytes], env: dict[str, str]
) -> _Forked:
    """Replace `subprocess.Popen` for fork servers; `stdout` is ignored, because they print
    nothing."""
    global _server
    if _server is None or _server.owner != os.getpid():
        _server = _Server(command[3:], env)
    return _server.fork(env, stdin, stderr.fileno())


def serve() -> None:
    """Fork servers on request of the process at the other end of stdin, a socket, until it ends."""
    leave_signals_to_parent()
    asked = Connection(os.dup(0))
    os.dup2(os.open(os.devnull, os.O_RDWR), 1)
    gc.collect()
    gc.freeze()  # otherwise, each fork server would collect garbage among all these imports
    # Keyed by the pidfd of a fork server: its process id, and the socket for its exit status.
    children: dict[int, tuple[int, int]] = {}
    while True:
        for ready in select.select([asked, *children], [], [])[0]:
            if ready is not asked:
                pid, status = children.pop(ready)
                _, code = os.waitpid(pid, 0)
                os.write(status, str(os.waitstatus_to_exitcode(code)).encode())
                os.close(status)
                os.close(ready)
                continue
            try:
                environment = asked.recv()
            except EOFError:
                return
            stdin, stderr, status = (recv_handle(asked) for _ in range(3))
            if not (pid := os.fork()):
                _be_server(environment, stdin, stderr)
            os.close(stdin)
            os.close(stderr)
            children[os.pidfd_open(pid)] = pid, status
            asked.send(pid)


def _be_server(environment: dict[str, str], stdin: int, stderr: int) -> None:
    code = 1
    try:
        os.dup2(stdin, 0)
        os.dup2(stderr, 2)
        os.closerange(3, os.sysconf("SC_OPEN_MAX"))
        os.environ.clear()
        os.environ.update(environment)
        fork_server.main()
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)
