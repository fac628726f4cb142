"""The process that forks workers; loads the tokenizer, has one thread, and imports no torch.

Forking takes milliseconds even if the tokenizer is large, and workers share the tokenizer's memory.
The server runs no row itself, so it always notices the end of the process that started it, and then
kills its workers.
"""

from __future__ import annotations

import gc
import os
import signal
from contextlib import suppress
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from multiprocessing.reduction import send_handle

from batchinfer.process.cpus import openmp_binds
from batchinfer.text.processes.limits import Limits, bound_memory, leave_signals_to_parent
from batchinfer.text.processes.worker import serve
from batchinfer.text.tokenizer import Tokenizer

GREETING = b"batchinfer: makes prompts\n"
"""First bytes that the server sends, to tell the parent that Python has started."""
# Seconds between checks that the parent is alive. The pipe may not show that the parent has ended,
# because another child of the parent may keep the parent's end of the pipe open.
_LOOK_S = 1.0
_STDERR_BYTES = 4096
"""Number of bytes to keep from the end of a worker's stderr, which says why native code died."""
_CRASHED = 70


def main() -> None:
    """Serve the process at the other end of stdin, a socket, until that process ends."""
    leave_signals_to_parent()
    # Allow all cores. Otherwise, all workers would share the core to which OpenMP has bound the
    # parent's thread.
    if hasattr(os, "sched_setaffinity") and openmp_binds():
        os.sched_setaffinity(0, range(os.cpu_count() or 1))
    control = Connection(os.dup(0))
    devnull = os.open(os.devnull, os.O_RDWR)
    os.dup2(devnull, 0)
    try:
        control.send_bytes(GREETING)
        tokenizer, limits, prepare = control.recv()
        if prepare is not None:
            with suppress(Exception):  # a worker calls it again and reports the error
                prepare()
        gc.collect()
        gc.freeze()  # otherwise, garbage collection in a worker would copy all pages
        _ForkServer(control, tokenizer, limits).run()
    except (EOFError, OSError):
        pass  # the parent has ended


class _ForkServer:
    def __init__(self, control: Connection, tokenizer: Tokenizer, limits: Limits) -> None:
        self._control = control
        self._tokenizer = tokenizer
        self._limits = limits
        self._stderr: dict[int, int] = {}
        """Read end of the pipe of each worker's stderr, keyed by the worker's process id."""

    def run(self) -> None:
        """Answer requests: None asks for a new worker; a process id asks how that worker ended."""
        parent = os.getppid()
        try:
            while os.getppid() == parent:
                if self._control.poll(_LOOK_S):
                    request = self._control.recv()
                    if request is None:
                        self._fork()
                    else:
                        self._control.send(self._end(request))
        finally:
            for pid in self._stderr:
                os.kill(pid, signal.SIGKILL)

    def _fork(self) -> None:
        """Fork a worker; send its process id and connection, or the reason for a failure."""
        stderr, worker_stderr = os.pipe()
        theirs, ours = Pipe()
        with ours, theirs:
            try:
                pid = os.fork()
            except OSError as error:
                os.close(stderr)
                os.close(worker_stderr)
                self._control.send(str(error))
                return
            if pid == 0:
                for descriptor in (stderr, *self._stderr.values()):
                    os.close(descriptor)
                self._control.close()
                theirs.close()
                self._be_worker(ours, worker_stderr)
            os.close(worker_stderr)
            self._stderr[pid] = stderr
            self._control.send(pid)
            send_handle(self._control, theirs.fileno(), os.getppid())

    def _end(self, pid: int) -> tuple[int, str, float]:
        """Kill a worker if it still runs, and return the fields of its ``deaths.End``."""
        stderr = self._stderr.pop(pid)
        os.kill(pid, signal.SIGKILL)
        _, status, usage = os.wait4(pid, 0)
        written = b""
        while data := os.read(stderr, 1 << 16):
            written = (written + data)[-_STDERR_BYTES:]
        os.close(stderr)
        cpu_seconds = usage.ru_utime + usage.ru_stime
        return os.waitstatus_to_exitcode(status), written.decode(errors="replace"), cpu_seconds

    def _be_worker(self, connection: Connection, stderr: int) -> None:
        code = _CRASHED
        try:
            os.dup2(stderr, 2)
            os.set_blocking(2, False)  # text that does not fit into the pipe is dropped
            bound_memory(self._limits.memory_bytes)
            serve(connection, self._tokenizer, self._limits)
            code = 0
        finally:
            os._exit(code)
