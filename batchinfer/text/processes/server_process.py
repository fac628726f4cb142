"""The parent's side of the fork server: starts it, and requests workers from it."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable
from contextlib import suppress
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from multiprocessing.reduction import recv_handle
from typing import IO, Any

from batchinfer.errors import DeviceError
from batchinfer.text.processes.deaths import End
from batchinfer.text.processes.fork_server import GREETING
from batchinfer.text.processes.limits import Limits
from batchinfer.text.tokenizer import Tokenizer

_BOOT = (
    "import sys; sys.path[:] = sys.argv[1:]; "
    "from batchinfer.text.processes.fork_server import main; main()"
)
_ENVIRONMENT = {  # a process that forks must have only one thread; workers use all cores
    "TOKENIZERS_PARALLELISM": "false",
    "RAYON_NUM_THREADS": "1",
    "TOKIO_WORKER_THREADS": "1",
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "RUST_BACKTRACE": "0",
}
_END_S = 2.0
_LOOK_S = 0.1
_ANSWER_S = 120.0
"""Seconds within which a live server answers on any machine."""
_STDERR_BYTES = 4096
"""Number of bytes to read from the end of the server's stderr, which says why the server died."""


class ForkRefusedError(Exception):
    """The system refused to fork another process; the message is the reason."""


class StoppedError(Exception):
    """Raised in threads that wait for prompts after ``TextProcesses.stop``."""


class ServerProcess:
    """A fork server, which starts at once and ends with this process. Thread-safe."""

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self._lock = threading.Lock()
        """Lock that is held from each request until its answer."""
        self._pids: set[int] = set()
        """Process ids of workers that may be alive."""
        self.owner = os.getpid()
        self._closed_for: Exception | None = None
        self.has_failed = False
        """True if the server can no longer be used."""
        self._failed_for = ""
        _require_interpreter()
        _occupy_standard_streams()
        self._stderr = _unnamed_file()  # a file, because a full pipe would stop the server
        self._control, theirs = Pipe()
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
                self._control.close()
                self._stderr.close()
                raise not_started(str(error)) from error

    def load(self, tokenizer: Tokenizer, prepare: Callable[[], object] | None = None) -> None:
        """Send the tokenizer that the workers use.

        Args:
            prepare: picklable function that the server calls before it forks, so that workers share
                what the function imports and caches.

        Raises:
            DeviceError: the server is dead or does not answer.
            StoppedError: ``close`` was called.
        """
        with self._lock:
            try:
                self._wait()
                if self._read_greeting() != GREETING:
                    raise OSError(f"{sys.executable} is not a Python interpreter")
                self._control.send((tokenizer, self.limits, prepare))
            except (OSError, EOFError) as error:
                raise self._failed(error) from error

    def fork(self) -> tuple[int, Connection]:
        """Fork a worker; return its process id and connection.

        Raises:
            ForkRefusedError: the system allows no more processes.
            DeviceError, StoppedError: see ``load``.
        """
        with self._lock:
            pid = self._ask(None)
            if isinstance(pid, str):
                raise ForkRefusedError(pid)
            self._pids.add(pid)
            try:
                return pid, Connection(recv_handle(self._control))
            except (OSError, EOFError, RuntimeError) as error:
                raise self._failed(error) from error

    def end(self, pid: int) -> End:
        """Kill a worker if it still runs, and return how it ended.

        Raises:
            DeviceError, StoppedError: see ``load``.
        """
        with self._lock:
            end = End(*self._ask(pid))
            self._pids.discard(pid)
            return end

    def close(self, reason: str | None = None) -> None:
        """End the server and its workers immediately.

        Args:
            reason: reason to give in the error that unfinished calls raise; None: the calls raise
                ``StoppedError``.
        """
        if self._closed_for is not None:
            return
        self._closed_for = StoppedError() if reason is None else not_started(reason)
        self.has_failed = True
        if self.owner != os.getpid():  # a forked process does not own the server
            self._process.returncode = 0
            self._close_files()
            return
        self._hang_up()
        try:
            self._process.wait(_END_S)
        except subprocess.TimeoutExpired:
            self._kill()
        with self._lock:  # waits until threads that waited for an answer have returned
            self._close_files()

    def _ask(self, request: int | None) -> Any:
        try:
            self._control.send(request)
            self._wait()
            return self._control.recv()
        except (OSError, EOFError) as error:
            raise self._failed(error) from error

    def _wait(self) -> None:
        """Wait for an answer.

        Raises:
            TimeoutError: the server is alive but does not answer.
        """
        # Count tries, because a clock would also count the time while the machine is suspended.
        for _ in range(round(_ANSWER_S / _LOOK_S)):
            if self._control.poll(_LOOK_S):
                return
        raise TimeoutError(f"it has not answered for {_ANSWER_S:g} s")

    def _read_greeting(self) -> bytes:
        try:
            return self._control.recv_bytes(len(GREETING))
        except OSError:  # another program's text was misread as a message length
            return b""

    def _hang_up(self) -> None:
        """Shut the connection down, so that the server ends and no thread here waits for an answer.

        Closing the connection is not enough if a forked process has it open too.
        """
        with suppress(OSError), socket.socket(fileno=os.dup(self._control.fileno())) as control:
            control.shutdown(socket.SHUT_RDWR)

    def _close_files(self) -> None:
        self._control.close()
        self._stderr.close()

    def _kill(self) -> None:
        # While the server is alive, the process ids of its workers cannot be reused.
        if self._process.poll() is None:
            for pid in self._pids:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        self._process.kill()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(_END_S)

    def _failed(self, error: Exception) -> Exception:
        """End a dead or misbehaving server; return an error with the reason."""
        if self._closed_for is not None:
            return self._closed_for
        if not self.has_failed:  # a later error only says that the server has ended
            self.has_failed = True
            self._failed_for = self._end_after(error)
        return not_started(self._failed_for)

    def _end_after(self, error: Exception) -> str:
        self._hang_up()
        has_ended = isinstance(error, EOFError | ConnectionError)
        if has_ended:
            with suppress(subprocess.TimeoutExpired):  # the server may still be writing the reason
                self._process.wait(_END_S)
        self._kill()
        lines = self._last_written().strip().splitlines()
        if has_ended:
            code = self._process.returncode
            return lines[-1] if lines else f"it ended (exit code {code})"
        written = f"; it wrote: {lines[-1]}" if lines else ""
        return f"{error}{written}"

    def _last_written(self) -> str:
        size = self._stderr.seek(0, os.SEEK_END)
        self._stderr.seek(max(0, size - _STDERR_BYTES))
        return self._stderr.read().decode(errors="replace")


def not_started(reason: str) -> DeviceError:
    """Return the error of a process that cannot make prompts, with the reason."""
    return DeviceError(
        f"the process that renders and tokenizes prompts cannot run: {reason}",
        hint=f"its command is {sys.executable or '(sys.executable is empty)'} -c ...; "
        "check that this is a Python interpreter, that memory is free, and that "
        "the limit on processes (ulimit -u) allows another one",
    )


def _require_interpreter() -> None:
    """Require a Python interpreter, because a frozen application would start itself again."""
    if getattr(sys, "frozen", False):
        raise not_started(f"{sys.executable} is a frozen application, not a Python interpreter")
    if not sys.executable:
        raise not_started(
            "Python is embedded in another program and does not know its "
            "interpreter; set sys.executable to the interpreter of the same "
            "environment"
        )


def _occupy_standard_streams() -> None:
    """Open /dev/null for closed standard streams, because prints could go to a worker's pipe."""
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= 2:
        pass
    os.close(descriptor)


def _unnamed_file() -> IO[bytes]:
    if sys.platform == "linux":  # does not need a writable folder
        return os.fdopen(os.memfd_create("stderr"), "w+b")
    return tempfile.TemporaryFile()


def _paths() -> list[str]:
    """Return ``sys.path`` with absolute paths, which do not depend on the current folder."""
    return [
        os.path.abspath(path) if os.path.exists(path or os.curdir) else path for path in sys.path
    ]
