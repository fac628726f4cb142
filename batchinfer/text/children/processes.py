"""Starts the spawner, and has children forked off it."""

from __future__ import annotations

import os
import pickle
import socket
import subprocess
import sys
import tempfile
from contextlib import suppress
from typing import IO, Any

from batchinfer.errors import DeviceError
from batchinfer.text.children import messages
from batchinfer.text.children.deaths import Death, death
from batchinfer.text.children.limits import Limits
from batchinfer.text.tokenizer import Tokenizer

_BOOT = (
    "import sys; sys.path[:] = sys.argv[1:]; "
    "from batchinfer.text.children.spawner import main; main()"
)
_ENVIRONMENT = {  # one thread: it is to be forked, and a process for each core is the parallelism
    "TOKENIZERS_PARALLELISM": "false",
    "RAYON_NUM_THREADS": "1",
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "RUST_BACKTRACE": "0",
}
_END_S = 2.0
_TOLD_BYTES = 4096
"""Of what the spawner wrote to stderr: its end, which says what it died of."""


class ForkRefusedError(Exception):
    """The system lets no further child be forked: why."""


class ChildProcess:
    """A child, as its parent sees it: nothing here waits for it."""

    def __init__(self, pid: int, connection: socket.socket) -> None:
        connection.setblocking(False)
        self.pid = pid
        self.said: tuple[str, str] | None = None
        """Cause and text of its last message, ``failed``."""
        self.fileno = connection.fileno
        self.close = connection.close
        self._connection = connection
        self._inbox = messages.Inbox()
        self._outbox = b""
        self._num_sent = 0

    def ask(self, *request: object) -> None:
        """Send a request, as far as the child reads it now."""
        self._outbox = self._outbox[self._num_sent :] + messages.framed(request)
        self._num_sent = 0
        self.send_more()

    @property
    def has_more_to_send(self) -> bool:
        """Whether requests wait to be read."""
        return self._num_sent < len(self._outbox)

    def send_more(self) -> None:
        """Send what waits to be read; of a child that is dead, ``answers`` will tell."""
        with suppress(OSError), memoryview(self._outbox) as outbox:
            while self.has_more_to_send:
                self._num_sent += self._connection.send(outbox[self._num_sent :])

    def answers(self) -> list[tuple[Any, ...]] | None:
        """The answers that can be read now; None where there will be no more: it is dead."""
        try:
            answers = self._inbox.take_from(self._connection)
        except EOFError:
            return None
        except pickle.UnpicklingError as error:
            self.said = "forged", str(error)  # it lives, and is to be killed for that
            return None
        if answers and answers[-1][0] == "failed":
            _, cause, text = answers.pop()
            self.said = cause, text
        return answers


class Spawner:
    """The spawner, as its parent sees it. Started at once; ends with this process."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        _occupy_standard_streams()
        self._stderr = _unnamed_file()  # a pipe that is full would stop it
        ours, theirs = socket.socketpair()
        with theirs:
            try:
                self._process = subprocess.Popen(
                    [sys.executable, "-c", _BOOT, *_paths()],
                    stdin=theirs.fileno(),
                    stdout=subprocess.DEVNULL,
                    stderr=self._stderr,
                    env={**os.environ, **_ENVIRONMENT},
                )
            except OSError as error:
                ours.close()
                self._stderr.close()
                raise not_started(str(error)) from error
        self._control = ours

    def load(self, tokenizer: Tokenizer) -> None:
        """Give it the tokenizer that its children use.

        Raises:
            DeviceError: it is dead.
        """
        try:
            messages.send(self._control, (tokenizer, self._limits))
        except OSError as error:
            raise self._dead() from error

    def fork(self) -> ChildProcess:
        """A new child.

        Raises:
            ForkRefusedError: the system lets it fork no more.
            DeviceError: the spawner is dead.
        """
        try:
            messages.send(self._control, None)
            pid = messages.receive(self._control)
            if isinstance(pid, str):
                raise ForkRefusedError(pid)
            _, descriptors, _, _ = socket.recv_fds(self._control, 1, 1)
        except (OSError, EOFError) as error:
            raise self._dead() from error
        return ChildProcess(pid, socket.socket(fileno=descriptors[0]))

    def end(self, child: ChildProcess) -> Death:
        """Kill a child if it is not dead already, and tell what it died of.

        Raises:
            DeviceError: the spawner is dead.
        """
        child.close()
        try:
            messages.send(self._control, child.pid)
            exit_code, stderr = messages.receive(self._control)
        except (OSError, EOFError) as error:
            raise self._dead() from error
        return death(self._limits, exit_code, stderr, child.said)

    def close(self) -> None:
        """End it, and with it its children, whatever they are at."""
        with suppress(OSError):  # closing is not enough where a forked process has it open too
            self._control.shutdown(socket.SHUT_RDWR)
        self._control.close()
        self._stderr.close()
        try:
            self._process.wait(_END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(_END_S)

    def leave(self) -> None:
        """In a process forked off the one that started it: let go of it, and leave it running."""
        self._control.close()
        self._stderr.close()
        self._process.returncode = 0  # not ours to wait for

    def _dead(self) -> DeviceError:
        self._control.close()
        self._process.kill()  # if it is not dead, it does not do what it should
        code = self._process.wait()
        lines = self._last_written().strip().splitlines()
        return not_started(lines[-1] if lines else f"it ended (exit code {code})")

    def _last_written(self) -> str:
        if self._stderr.closed:
            return ""
        size = self._stderr.seek(0, os.SEEK_END)
        self._stderr.seek(max(0, size - _TOLD_BYTES))
        return self._stderr.read().decode(errors="replace")


def not_started(reason: str) -> DeviceError:
    """The error for what keeps prompts from being made at all."""
    return DeviceError(
        f"the process that renders and tokenizes prompts cannot run: {reason}",
        hint=f"it is started as {sys.executable or 'python'} -c ...; it needs memory and a free "
        "process (ulimit -u)",
    )


def _occupy_standard_streams() -> None:
    """Open those that are closed: else a socket to a child is what somebody prints to."""
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= 2:
        pass
    os.close(descriptor)


def _unnamed_file() -> IO[bytes]:
    if sys.platform == "linux":  # needs no folder that can be written to
        return os.fdopen(os.memfd_create("stderr"), "w+b")
    return tempfile.TemporaryFile()


def _paths() -> list[str]:
    """``sys.path``, without the names that mean the current folder."""
    return [
        os.path.abspath(path) if os.path.exists(path or os.curdir) else path for path in sys.path
    ]
