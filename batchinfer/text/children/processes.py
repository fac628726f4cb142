"""Starts the spawner, and has children forked off it."""

from __future__ import annotations

import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from contextlib import suppress
from typing import IO

from batchinfer.errors import DeviceError
from batchinfer.text.children import messages
from batchinfer.text.children.child_process import ChildProcess
from batchinfer.text.children.deaths import End
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
LOOK_S = 0.1  # for ``TextProcesses.stop``
_ANSWER_S = 120.0
"""Time in which a spawner that is alive answers, on any machine; one that is paused for longer, all
of it, takes up no more of this than a look."""
_TOLD_BYTES = 4096
"""Of what the spawner wrote to stderr: its end, which says what it died of."""


class ForkRefusedError(Exception):
    """The system lets no further child be forked: why."""


class StoppedError(Exception):
    """Raised to whoever waits for prompts after ``TextProcesses.stop``."""


class Spawner:
    """The spawner, as its parent sees it. Started at once; ends with this process.

    Args:
        stopped: nobody waits for it any more once this is set, but has a ``StoppedError``.
    """

    def __init__(self, limits: Limits, stopped: threading.Event) -> None:
        self._limits = limits
        self._stopped = stopped
        self._pids: set[int] = set()
        """Children that it has not been asked to end."""
        _require_interpreter()
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
        ours.setblocking(False)
        self._control = ours

    def load(self, tokenizer: Tokenizer) -> None:
        """Give it the tokenizer that its children use.

        Raises:
            DeviceError: it is dead, or does not answer.
        """
        try:
            expected = messages.GREETING
            if messages.receive_exactly(self._control, len(expected), self._wait) != expected:
                raise OSError(f"{sys.executable} is no Python interpreter")
            messages.send(self._control, (tokenizer, self._limits), self._wait)
        except (OSError, EOFError) as error:
            raise self._failed(error) from error

    def fork(self) -> ChildProcess:
        """A new child.

        Raises:
            ForkRefusedError: the system lets it fork no more.
            DeviceError: the spawner is dead, or does not answer.
        """
        try:
            messages.send(self._control, None, self._wait)
            pid = messages.receive(self._control, self._wait)
            if isinstance(pid, str):
                raise ForkRefusedError(pid)
            self._wait(select.POLLIN)
            _, descriptors, _, _ = socket.recv_fds(self._control, 1, 1)
        except (OSError, EOFError) as error:
            raise self._failed(error) from error
        self._pids.add(pid)
        return ChildProcess(pid, socket.socket(fileno=descriptors[0]))

    def end(self, child: ChildProcess) -> End:
        """Kill a child if it is not dead already, and tell how it ended.

        Raises:
            DeviceError: the spawner is dead, or does not answer.
        """
        child.close()
        try:
            messages.send(self._control, child.pid, self._wait)
            self._pids.discard(child.pid)
            return End(*messages.receive(self._control, self._wait))
        except (OSError, EOFError) as error:
            raise self._failed(error) from error

    @property
    def has_failed(self) -> bool:
        """Whether it is of no use any more."""
        return self._control.fileno() == -1

    def _wait(self, events: int) -> None:
        """Wait until it can be sent to, or received from.

        Raises:
            TimeoutError: it lives, and does nothing.
        """
        poll = select.poll()
        poll.register(self._control, events)
        for _ in range(round(_ANSWER_S / LOOK_S)):  # no clock: it runs on while we are paused
            if self._stopped.is_set():
                raise StoppedError
            if poll.poll(LOOK_S * 1000):
                return
        raise TimeoutError(f"it has not answered for {_ANSWER_S:g} s")

    def close(self) -> None:
        """End it, and with it its children, whatever they are at."""
        with suppress(OSError):  # closing is not enough where a forked process has it open too
            self._control.shutdown(socket.SHUT_RDWR)
        self._control.close()
        self._stderr.close()
        try:
            self._process.wait(_END_S)
        except subprocess.TimeoutExpired:
            self._kill()

    def leave(self) -> None:
        """In a process forked off the one that started it: let go of it, and leave it running."""
        self._control.close()
        self._stderr.close()
        self._process.returncode = 0  # not ours to wait for

    def _kill(self) -> None:
        if self._process.poll() is None:  # then nobody else has waited for its children
            for pid in self._pids:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        self._process.kill()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(_END_S)

    def _failed(self, error: Exception) -> DeviceError:
        """End what is dead, or does not do what it should; why that is."""
        self._control.close()
        has_ended = isinstance(error, EOFError | BrokenPipeError)
        if has_ended:
            with suppress(subprocess.TimeoutExpired):  # it tells why just now
                self._process.wait(_END_S)
        self._kill()
        lines = self._last_written().strip().splitlines()
        if has_ended:
            code = self._process.returncode
            return not_started(lines[-1] if lines else f"it ended (exit code {code})")
        told = f"; it wrote: {lines[-1]}" if lines else ""
        return not_started(f"{error}{told}")

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
        hint=f"it is started as {sys.executable or '(sys.executable is empty)'} -c ...; that must "
        "be a Python interpreter, and it needs memory and a free process (ulimit -u)",
    )


def _require_interpreter() -> None:
    """Check that there is a Python to start: an application that is started instead would only
    begin all over."""
    if getattr(sys, "frozen", False):
        raise not_started(f"{sys.executable} is a frozen application, not a Python interpreter")
    if not sys.executable:
        raise not_started(
            "Python is part of another program here, and does not know its interpreter; set "
            "sys.executable to that of the same environment"
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
