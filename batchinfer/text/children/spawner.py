"""The process that children are forked off: it has the tokenizer loaded, one thread, and no torch.

Forking it takes milliseconds, whatever the tokenizer's size, and children share its memory; a dead
child is replaced at once. It runs nothing of a row itself, so that it always hears when the process
that started it is gone, however that ended, and kills its children then.
"""

from __future__ import annotations

import gc
import os
import select
import signal
import socket

from batchinfer.cpus import openmp_binds
from batchinfer.text.children import messages
from batchinfer.text.children.child import serve
from batchinfer.text.children.limits import Limits, bound_memory, leave_signals_to_parent
from batchinfer.text.tokenizer import Tokenizer

_LOOK_S = 1.0  # for the parent, whose end of the socket may live on in a process it forked
_TOLD_BYTES = 4096
"""Of what a child wrote to stderr: its end, which says what native code died of."""
_CRASHED = 70


def main() -> None:
    """Serve the process at the other end of stdin, a socket, until that is gone."""
    leave_signals_to_parent()
    # Else all of us share the one place that OpenMP has bound whoever started us to.
    if hasattr(os, "sched_setaffinity") and openmp_binds():
        os.sched_setaffinity(0, range(os.cpu_count() or 1))
    control = socket.socket(fileno=os.dup(0))
    devnull = os.open(os.devnull, os.O_RDWR)
    os.dup2(devnull, 0)
    try:
        control.sendall(messages.GREETING)
        tokenizer, limits = messages.receive(control)
        gc.collect()
        gc.freeze()  # a collection in a child would else copy all pages
        _Spawner(control, tokenizer, limits).run()
    except (EOFError, OSError):
        pass  # nobody is there any more


class _Spawner:
    def __init__(self, control: socket.socket, tokenizer: Tokenizer, limits: Limits) -> None:
        self._control = control
        self._tokenizer = tokenizer
        self._limits = limits
        self._stderr: dict[int, int] = {}
        """Of each living child's process id: the end of a pipe to read."""

    def run(self) -> None:
        """Answer commands: None for a new child, a process id for how that child ended."""
        parent = os.getppid()
        try:
            while os.getppid() == parent:
                if select.select([self._control], [], [], _LOOK_S)[0]:
                    command = messages.receive(self._control)
                    if command is None:
                        self._fork()
                    else:
                        messages.send(self._control, self._end(command))
        finally:
            for pid in self._stderr:
                os.kill(pid, signal.SIGKILL)

    def _fork(self) -> None:
        """Fork a child and send its process id, and the socket to reach it by; where the system
        does not let us, why not."""
        told, tells = os.pipe()
        theirs, ours = socket.socketpair()
        with ours, theirs:
            try:
                pid = os.fork()
            except OSError as error:
                os.close(told)
                os.close(tells)
                messages.send(self._control, str(error))
                return
            if pid == 0:
                for descriptor in (told, *self._stderr.values()):
                    os.close(descriptor)
                self._control.close()
                theirs.close()
                self._be_child(ours, tells)
            os.close(tells)
            self._stderr[pid] = told
            messages.send(self._control, pid)
            socket.send_fds(self._control, [b"\0"], [theirs.fileno()])

    def _end(self, pid: int) -> tuple[int, str, float]:
        """How a child ended: values of ``deaths.End``."""
        told = self._stderr.pop(pid)
        os.kill(pid, signal.SIGKILL)  # of one that is dying, it changes nothing
        _, status, usage = os.wait4(pid, 0)
        written = b""
        while data := os.read(told, 1 << 16):
            written = (written + data)[-_TOLD_BYTES:]
        os.close(told)
        cpu_seconds = usage.ru_utime + usage.ru_stime
        return os.waitstatus_to_exitcode(status), written.decode(errors="replace"), cpu_seconds

    def _be_child(self, connection: socket.socket, stderr: int) -> None:
        code = _CRASHED
        try:
            os.dup2(stderr, 2)
            os.set_blocking(2, False)  # what does not fit into the pipe is lost
            bound_memory(self._limits.memory_bytes)
            serve(connection, self._tokenizer, self._limits)
            code = 0
        finally:
            os._exit(code)
